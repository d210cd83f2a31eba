package cloudhypervisor_test

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/ephemeral-run/ephemeral/node/guest"
	"github.com/ephemeral-run/ephemeral/vmm/cloudhypervisor"
	"github.com/ephemeral-run/ephemeral/vmm/jail"
	"github.com/ephemeral-run/ephemeral/vmm/provision"
	"github.com/ephemeral-run/ephemeral/vmm/vmmtest"
)

// TestRealUnprivileged makes machines as a node does, each in its jail with its tap, and reads back from /proc what its
// process may do. The guest's way out ends at the tap.
func TestRealUnprivileged(t *testing.T) {
	d := realDriver(t)
	dir, err := os.MkdirTemp("/var/tmp", "ch-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o711); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 15*time.Minute)
	defer cancel()
	p, err := provision.New(ctx, provision.Config{
		DataDir: dir, MemoryMiB: 384, VCPUs: 1, Rest: provision.RestRunning, TemplateTimeout: 8 * time.Minute,
		Jail: jail.Config{
			Bubblewrap: "bwrap", RunDir: "/run/ephemeral", Cgroup: "ephemeral-ch-test", FirstUID: 20000, UIDs: 100,
			OverheadMiB: 256, Pids: 128, CPUWeight: 50, OpenFiles: 1024, OOMScoreAdj: 500,
		},
	}, d, provision.Agent{Probe: guest.Probe, Warm: guest.Warm})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
		residue, err := p.Reconcile(context.Background())
		if err == nil && residue.Total() != 0 {
			t.Errorf("left: %+v", residue)
		}
	})
	tmpl, err := p.Template(ctx, vmmtest.Image(t), provision.Config{MemoryMiB: 384, VCPUs: 1}.Shape(), func(line string) { t.Log(line) })
	if err != nil {
		t.Fatal(err)
	}
	for i := range 3 {
		m, err := p.Create(ctx, tmpl)
		if err != nil {
			t.Fatal(err)
		}
		s, err := m.Stats()
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("machine %d: %v, %.1f MiB private", i, m.Steps(), float64(s.PrivateBytes)/(1<<20))
		confined(t, s.Pid)
		var out bytes.Buffer
		err = vmmtest.NewAgent(m.Dial).Run(ctx, nil, &out, "sh", "-c", "curl -sS https://example.com 2>&1; cat /proc/net/dev | grep eth0; true")
		if err != nil {
			t.Error(err)
		}
		if got := out.String(); !strings.Contains(got, "curl: (6) Could not resolve host: example.com") || !strings.Contains(got, "eth0") {
			t.Errorf("the guest says %q", got)
		}
	}
}

// confined checks what the kernel says of a machine's process.
func confined(t *testing.T, pid int) {
	t.Helper()
	tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", pid))
	if err != nil || len(tasks) < 3 {
		t.Fatalf("%d threads (%v)", len(tasks), err)
	}
	for _, path := range tasks {
		content, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		status := map[string]string{}
		for line := range strings.Lines(string(content)) {
			name, value, _ := strings.Cut(line, ":")
			status[name] = strings.Join(strings.Fields(value), " ")
		}
		if strings.HasPrefix(status["Uid"], "0 ") || strings.HasPrefix(status["Gid"], "0 ") {
			t.Errorf("%s: user %s, group %s", status["Name"], status["Uid"], status["Gid"])
		}
		for _, set := range []string{"CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"} {
			if status[set] != "0000000000000000" {
				t.Errorf("%s: %s is %s", status["Name"], set, status[set])
			}
		}
		if status["NoNewPrivs"] != "1" || status["Seccomp"] != "2" {
			t.Errorf("%s: NoNewPrivs %s, Seccomp %s", status["Name"], status["NoNewPrivs"], status["Seccomp"])
		}
	}
	for _, ns := range []string{"net", "pid", "mnt", "ipc", "uts", "user"} {
		theirs, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", pid, ns))
		ours, oerr := os.Readlink("/proc/self/ns/" + ns)
		if err != nil || oerr != nil || theirs == ours {
			t.Errorf("namespace %s: %s, the node's is %s (%v, %v)", ns, theirs, ours, err, oerr)
		}
	}
	limits, err := os.ReadFile(fmt.Sprintf("/proc/%d/limits", pid))
	if err != nil || !regexp.MustCompile(`(?m)^Max open files +4096 +4096 `).Match(limits) {
		t.Errorf("limits (%v):\n%s", err, limits)
	}
	if abi := cloudhypervisor.LandlockABI(); abi < 3 {
		t.Errorf("landlock ABI %d: not confined by it", abi)
	}
}
