package kvmbox

import (
	"bytes"
	"context"
	"io"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

// TestUnifiedHierarchy runs the tests of what a machine's walls are made of in a box, whose only hierarchy is that of cgroup v2,
// with every controller: on a host with v1 the controllers are there, and v2 can limit nothing. The box also has another
// distribution, kernel and bubblewrap.
func TestUnifiedHierarchy(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	dir := t.TempDir()
	hostile := filepath.Join(dir, "hostile")
	if err := Build(ctx, checkout(t), "./vmm/jail/testdata/hostile", hostile); err != nil {
		t.Fatal(err)
	}
	carry := map[string]string{"hostile": hostile}
	packages := []string{"jail", "network"}
	for _, name := range packages {
		carry[name+".test"] = filepath.Join(dir, name+".test")
		if err := BuildTest(ctx, checkout(t), "./vmm/"+name, carry[name+".test"]); err != nil {
			t.Fatal(err)
		}
	}
	place := openAny(t, carry, true)
	for _, name := range packages {
		t.Run(name, func(t *testing.T) {
			out := runTests(ctx, t, place, name+".test", "EPHEMERAL_TEST_HOSTILE="+place.Path("hostile"))
			list, err := exec.CommandContext(ctx, carry[name+".test"], "-test.list", "^Test").Output()
			if err != nil {
				t.Fatal(err)
			}
			for test := range strings.Lines(string(list)) {
				if !strings.Contains(out, "--- PASS: "+strings.TrimSpace(test)+" ") {
					t.Errorf("%s has not passed in the place", strings.TrimSpace(test))
				}
			}
			if name == "jail" && !strings.Contains(out, "cgroup v2\n") {
				t.Error("the jail was not on cgroup v2")
			}
		})
	}
}

// runTests runs all tests of a program that is carried, and returns what they say.
func runTests(ctx context.Context, t *testing.T, place Place, program string, env ...string) string {
	t.Helper()
	var out bytes.Buffer
	code, err := place.Run(ctx, Command{
		Args:   []string{place.Path(program), "-test.v", "-test.run", "^Test", "-test.timeout", limit.String()},
		Env:    append(env, "EPHEMERAL_TEST_SLOW="+strconv.Itoa(slowInBox), "PATH="+boxPath),
		Dir:    "/tmp",
		Stdout: io.MultiWriter(&out, t.Output()), Stderr: t.Output(),
	})
	if err != nil || code != 0 {
		t.Errorf("code %d, %v", code, err)
	}
	return out.String()
}
