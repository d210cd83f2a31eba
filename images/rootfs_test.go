package images

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// script writes a shell script and returns its path.
func script(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "script")
	must(t, os.WriteFile(path, []byte("#!/bin/sh\n"+text), 0o755))
	return path
}

func TestProgramShowsItsLines(t *testing.T) {
	var said []string
	b := &builder{Options: Options{Progress: func(s string) { said = append(said, s) }}}
	path := script(t, `printf 'one\n\ntwo\rthree'; echo "$LC_ALL $GREETING" >&2`)
	must(t, b.program(t.Context(), []string{"GREETING=hello"}, path))
	want := []string{path + ": one", path + ": two", path + ": threeC.UTF-8 hello"}
	if !slices.Equal(said, want) {
		t.Errorf("%q, want %q", said, want)
	}
}

func TestProgramFails(t *testing.T) {
	b := &builder{Options: Options{Progress: func(string) {}}}
	err := b.program(t.Context(), nil, script(t, "seq 100; echo E: mirror unreachable; exit 3"))
	if err == nil || !strings.Contains(err.Error(), "exit status 3") || !strings.Contains(err.Error(), "E: mirror unreachable") ||
		strings.Contains(err.Error(), "| 50 |") {
		t.Errorf("%v, want the exit status and the last lines only", err)
	}
	if errors.Is(err, ErrNoSpace) {
		t.Errorf("%v is no space", err)
	}
	err = b.program(t.Context(), nil, script(t, "echo 'dpkg: error: No space left on device'; exit 1"))
	if !errors.Is(err, ErrNoSpace) {
		t.Errorf("%v, want no space", err)
	}
	if err := b.program(t.Context(), nil, "/no/such/program"); err == nil {
		t.Error("a missing program ran")
	}
}

// TestProgramStops: when the context ends, the program and its children end, also one that ignores the wish.
func TestProgramStops(t *testing.T) {
	b := &builder{Options: Options{Progress: func(string) {}}, grace: 200 * time.Millisecond}
	pidFile := filepath.Join(t.TempDir(), "pid")
	path := script(t, "(trap '' TERM; sleep 300 & wait) & echo $! >"+pidFile+".tmp; mv "+pidFile+".tmp "+pidFile+"; wait")
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- b.program(ctx, nil, path) }()
	for start := time.Now(); ; time.Sleep(5 * time.Millisecond) {
		if _, err := os.Stat(pidFile); err == nil {
			break
		}
		if time.Since(start) > 10*time.Second {
			t.Fatal("the program did not start")
		}
	}
	pid, err := strconv.Atoi(strings.TrimSpace(get(t, pidFile)))
	must(t, err)
	cancel()
	select {
	case err := <-done:
		if !errors.Is(err, context.Canceled) {
			t.Errorf("%v, want canceled", err)
		}
	case <-time.After(stopGrace + 5*time.Second):
		t.Fatal("the program goes on")
	}
	for start := time.Now(); alive(pid); time.Sleep(5 * time.Millisecond) {
		if time.Since(start) > 5*time.Second {
			t.Fatalf("child %d goes on", pid)
		}
	}
}

// alive tells whether a process runs; one that only waits to be reaped does not.
func alive(pid int) bool {
	if unix.Kill(pid, 0) != nil {
		return false
	}
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	return err == nil && !strings.Contains(string(b), ") Z ")
}

// TestMissingPrograms: what has to be installed is named before anything is made.
func TestMissingPrograms(t *testing.T) {
	b := newBuilding(t)
	t.Setenv("PATH", t.TempDir())
	_, err := Build(t.Context(), b.Options)
	if err == nil || !strings.Contains(err.Error(), "needs mmdebstrap: run `make setup`") {
		t.Errorf("%v, want the missing program and the fix", err)
	}
}

// TestBuildDebian makes whole images twice, from the archive, and compares: the same packages, files and commands give the same
// bytes. It takes minutes and a Debian mirror; EPHEMERAL_TEST_IMAGE_BUILD asks for it.
func TestBuildDebian(t *testing.T) {
	if os.Getenv("EPHEMERAL_TEST_IMAGE_BUILD") == "" {
		t.Skip("EPHEMERAL_TEST_IMAGE_BUILD is not set: make chaos does; make image builds the same")
	}
	recipe, err := parseRecipe("rep", []byte(`
packages: [bc, python3-yaml]
files: [{path: /home/worker/.config/tools.conf, content: "key: value\n"}, {path: /opt/hello, mode: "0755", content: "#!/bin/sh\necho hello\n"}]
commands:
  - 'chown -R worker: /home/worker'
  - >-
    mkdir /opt/made && python3 -c 'import yaml; print(yaml.safe_dump({"b": 2, "a": [1, 2]}))' >/opt/made/out.yaml
  - useradd --system tool
`), nil)
	must(t, err)
	for _, r := range []Recipe{Base(), recipe} {
		t.Run(r.Name, func(t *testing.T) {
			b := newBuilding(t)
			b.Recipe = r
			b.Progress = func(s string) { t.Log(s) }
			first, err := Build(t.Context(), b.Options)
			must(t, err)
			b.Rebuild = true
			second, err := Build(t.Context(), b.Options)
			must(t, err)
			if first.Digest != second.Digest {
				t.Errorf("digests %s and %s of the same inputs", first.Digest, second.Digest)
			}
			t.Setenv("EPHEMERAL_TEST_IMAGE", filepath.Dir(second.Kernel))
			TestBuiltImage(t)
		})
	}
}
