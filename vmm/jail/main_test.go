package jail

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/ephemeral-run/ephemeral/vmm"
	"github.com/ephemeral-run/ephemeral/vmm/network"
)

// helperVariable makes the test binary play a node that is going to be killed; see helper_test.go.
const helperVariable = "JAIL_TEST_HELPER"

func TestMain(m *testing.M) {
	if os.Getenv(helperVariable) != "" {
		helper()
		return
	}
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		if built != "" {
			_ = os.RemoveAll(built)
		}
		os.Exit(code)
	}))
}

// built is the directory of the hostile program, once it was needed.
var built string

// hostile builds the program that stands in for a taken-over VMM, unless EPHEMERAL_TEST_HOSTILE names it. Static and without
// race detector, which would want /proc: it has to run in the jail.
var hostile = sync.OnceValues(func() (string, error) {
	if path := os.Getenv("EPHEMERAL_TEST_HOSTILE"); path != "" {
		return path, nil
	}
	dir, err := publicDir()
	if err != nil {
		return "", err
	}
	built = dir
	path := filepath.Join(dir, "hostile")
	cmd := exec.Command("go", "build", "-o", path, "./testdata/hostile")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("%w: %s", err, out)
	}
	return path, nil
})

// publicDir is a temporary directory whose parents everybody may search, unlike those of t.TempDir.
func publicDir() (string, error) {
	dir, err := os.MkdirTemp("/tmp", "jail-test-")
	if err != nil {
		return "", err
	}
	return dir, os.Chmod(dir, 0o755)
}

func tempDir(t testing.TB) string {
	t.Helper()
	dir, err := publicDir()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

func hostileProgram(t testing.TB) string {
	t.Helper()
	path, err := hostile()
	if err != nil {
		t.Fatalf("build the hostile program: %v", err)
	}
	return path
}

// testConfig has the defaults, with names of its own and a range of user ids of its own.
func testConfig(node string) Config {
	return Config{
		Node: node, Bubblewrap: "bwrap", RunDir: "/run/ephemeral-test", Cgroup: "ephemeral-test", FirstUID: 31000, UIDs: 1000,
		OverheadMiB: 256, Pids: 128, CPUWeight: 50, OpenFiles: 1024, OOMScoreAdj: 500,
	}
}

func randomName(t testing.TB, prefix string) string {
	t.Helper()
	b := make([]byte, 6)
	if _, err := rand.Read(b); err != nil {
		t.Fatal(err)
	}
	return prefix + hex.EncodeToString(b)
}

// rig is a jail and a network of a node that only one test has. After the test nothing of it may be left.
type rig struct {
	*Jail
	network *network.Network
	config  Config
}

func newRig(t testing.TB, change ...func(*Config)) *rig {
	t.Helper()
	if os.Getuid() != 0 {
		t.Fatal("this test needs root: it makes namespaces, cgroups and processes of other users")
	}
	config := testConfig(randomName(t, "jt-"))
	for _, c := range change {
		c(&config)
	}
	n, err := network.Open(context.Background(), config.Node)
	if err != nil {
		t.Fatal(err)
	}
	j, err := Open(config)
	if err != nil {
		_ = n.Close()
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := j.Close(); err != nil {
			t.Error(err)
		}
		if err := n.Close(); err != nil {
			t.Error(err)
		}
		checkNothingLeft(t, config)
	})
	return &rig{Jail: j, network: n, config: config}
}

// checkNothingLeft looks for processes and cgroups of a node.
func checkNothingLeft(t testing.TB, c Config) {
	t.Helper()
	deadline := time.Now().Add(5 * time.Second)
	for {
		left := leftovers(t, c)
		if len(left) == 0 {
			return
		}
		if time.Now().After(deadline) {
			t.Errorf("left behind: %s", strings.Join(left, "; "))
			return
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// leftovers names a node's cgroups and the processes in them, in which everything of it is born.
func leftovers(t testing.TB, c Config) []string {
	t.Helper()
	var left []string
	for _, root := range []string{"/sys/fs/cgroup/*/", "/sys/fs/cgroup/"} {
		for _, pattern := range []string{"", "/cgroup.procs", "/*/cgroup.procs"} {
			found, err := filepath.Glob(root + c.Cgroup + "/" + c.Node + pattern)
			if err != nil {
				t.Fatal(err)
			}
			for _, path := range found {
				if pattern == "" {
					left = append(left, path)
					continue
				}
				pids, err := readPids(path)
				if err != nil {
					t.Fatal(err)
				}
				for _, pid := range pids {
					cmdline, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
					left = append(left, fmt.Sprintf("process %d %q", pid, cmdline))
				}
			}
		}
	}
	return left
}

// cell makes a cell that is closed when the test ends.
func (r *rig) cell(t testing.TB, memoryMiB int) *Cell {
	t.Helper()
	c, err := r.New(randomName(t, ""), Options{MemoryMiB: memoryMiB, Netns: r.network})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	return c
}

// machineDir is a directory of the cell's user.
func machineDir(t testing.TB, c *Cell) string {
	t.Helper()
	dir := filepath.Join(tempDir(t), "machine")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Chown(dir, c.UID(), c.UID()); err != nil {
		t.Fatal(err)
	}
	return dir
}

func launchOrFail(t testing.TB, c *Cell, command vmm.Command) vmm.Process {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	p, err := c.Launch(ctx, command)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func waitDone(t testing.TB, p vmm.Process) {
	t.Helper()
	select {
	case <-p.Done():
	case <-time.After(20 * time.Second):
		t.Fatalf("process %d does not end", p.Pid())
	}
}
