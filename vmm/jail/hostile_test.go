package jail

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/ephemeral-run/ephemeral/vmm"
)

// target is what the hostile program attacks; see testdata/hostile.
type target struct {
	Pid                           int
	File, Neighbor, Own, ReadOnly string
	TCP, Abstract, Tap            string
}

// allowed is what a VMM may do. Everything else that the hostile program tries must fail.
var allowed = []string{"write own directory", "read read-only file", "read null device"}

// control is what an unprivileged program outside of a jail gets done: it shows that the attempts are real ones.
var control = []string{
	"write own directory", "read read-only file", "read null device", "read host file", "open host process",
	"connect to host", "connect abstract socket", "listen on host", "send to loopback", "netlink",
	"open /etc/passwd", "open /etc/hostname", "open /proc/self/status", "open /bin/sh", "open /var/lib", "open /run", "open 2000 files",
}

// TestHostileVMM puts a hostile program in the VMM's place.
func TestHostileVMM(t *testing.T) {
	t.Run("without /proc", func(t *testing.T) { beHostile(t, false) })
	t.Run("with /proc", func(t *testing.T) { beHostile(t, true) })
}

func beHostile(t *testing.T, proc bool) {
	program := hostileProgram(t)
	r := newRig(t)
	victim, attacker := r.cell(t, 64), r.cell(t, 64)
	aim := attack(t, r, victim, attacker)

	results := jailed(t, attacker, program, aim, proc)
	if len(results) < 60 {
		t.Fatalf("only %d attempts", len(results))
	}
	allowed := allowed
	if proc {
		// Its own, and settings that it may look at.
		allowed = append(slices.Clone(allowed), "open /proc/self/status", "open /proc/1/environ", "open /proc/sys/kernel/core_pattern")
	}
	for _, name := range allowed {
		if err, ok := results[name]; !ok || err != "" {
			t.Errorf("%s: %q (tried: %v)", name, err, ok)
		}
		delete(results, name)
	}
	for name, err := range results {
		if err == "" {
			t.Errorf("%s: succeeded", name)
		}
	}
	checkReasons(t, results, proc)
	if got := readFile(t, aim.ReadOnly); got != "read-only" {
		t.Errorf("the read-only file is now %q", got)
	}
}

// TestHostileOutside runs the same program without a jail, as a user without privileges.
func TestHostileOutside(t *testing.T) {
	program := hostileProgram(t)
	r := newRig(t)
	victim, attacker := r.cell(t, 64), r.cell(t, 64)
	aim := attack(t, r, victim, attacker)
	cmd := exec.Command(program)
	cmd.ExtraFiles = []*os.File{jsonFile(t, aim)}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(attacker.UID()), Gid: uint32(attacker.UID())}}
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	var results map[string]string
	if err := json.Unmarshal(out, &results); err != nil {
		t.Fatal(err)
	}
	for _, name := range control {
		if err, ok := results[name]; !ok || err != "" {
			t.Errorf("%s: %q (tried: %v): the attempt is worth nothing in TestHostileVMM", name, err, ok)
		}
	}
	if results["read neighbour"] == "" {
		t.Error("read neighbour: another user id alone must forbid it")
	}
}

// checkReasons holds some failures to the wall that is meant to make them.
func checkReasons(t *testing.T, results map[string]string, proc bool) {
	reasons := map[string]string{
		"read host file": "no such file or directory", "read neighbour": "no such file or directory",
		"open /etc/shadow": "no such file or directory", "open /dev/kvm": "no such file or directory",
		"open /dev/mem": "no such file or directory", "see host process": "no such file or directory",
		"leave by root link": "no such file or directory", "write root": "read-only file system", "write read-only file": "read-only file system",
		"signal host process": "no such process", "open host process": "no such process",
		"connect to host": "network is unreachable", "connect to internet": "network is unreachable",
		"connect abstract socket": "connection refused",
		"trace host process":      "operation not permitted", "load program into kernel": "operation not permitted",
		"io_uring": "operation not permitted", "userfaultfd": "operation not permitted",
		"new user namespace": "operation not permitted", "clone user namespace": "operation not permitted",
		"clone3": "function not implemented", "vsock": "address family not supported by protocol",
		"packet socket": "address family not supported by protocol", "raw socket": "operation not permitted",
		"become root": "invalid argument", "raise open files": "operation not permitted",
		"take tap down": "operation not permitted", "bring loopback up": "operation not permitted",
	}
	if proc {
		reasons["write core pattern"] = "read-only file system"
		reasons["escape the OOM killer"] = "read-only file system"
	}
	for name, want := range reasons {
		if got := results[name]; !strings.HasSuffix(got, want) {
			t.Errorf("%s: %q, not %q", name, got, want)
		}
	}
}

// attack prepares a host to be attacked.
func attack(t *testing.T, r *rig, victim, attacker *Cell) target {
	t.Helper()
	dir := tempDir(t)
	file, given := filepath.Join(dir, "host"), filepath.Join(dir, "given")
	if err := os.WriteFile(file, []byte("host"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(given, []byte("read-only"), 0o666); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(given, 0o666); err != nil { // whatever the umask is: the mount alone must forbid to write
		t.Fatal(err)
	}
	neighbor := filepath.Join(machineDir(t, victim), "secret")
	if err := os.WriteFile(neighbor, []byte("secret"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chown(neighbor, victim.UID(), victim.UID()); err != nil {
		t.Fatal(err)
	}
	tap, err := r.network.NewTap("0123456789cd", attacker.UID())
	if err != nil {
		t.Fatal(err)
	}
	tcp, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	abstract := randomName(t, "ephemeral-test-")
	unix, err := net.Listen("unix", "@"+abstract)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = tcp.Close(), unix.Close() })
	return target{
		Pid: os.Getpid(), File: file, Neighbor: neighbor, Own: machineDir(t, attacker), ReadOnly: given,
		TCP: tcp.Addr().String(), Abstract: abstract, Tap: tap.Name,
	}
}

func jsonFile(t *testing.T, v any) *os.File {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.CreateTemp(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	if _, err := f.Write(b); err != nil {
		t.Fatal(err)
	}
	if _, err := f.Seek(0, 0); err != nil {
		t.Fatal(err)
	}
	return f
}

// jailed runs the hostile program in a cell and returns what came of its attempts.
func jailed(t *testing.T, c *Cell, program string, aim target, proc bool) map[string]string {
	t.Helper()
	var out buffer
	p := launchOrFail(t, c, vmm.Command{
		Args: []string{program}, Files: []*os.File{jsonFile(t, aim)},
		ReadOnly: []string{aim.ReadOnly}, Writable: []string{aim.Own}, Proc: proc, Stderr: &out,
	})
	waitDone(t, p)
	if err := p.Err(); err != nil {
		t.Fatalf("the hostile program failed: %v\n%s", err, out.String())
	}
	var results map[string]string
	if err := json.Unmarshal([]byte(out.String()), &results); err != nil {
		t.Fatalf("%v in %q", err, out.String())
	}
	return results
}

// buffer is a bytes.Buffer for several goroutines.
type buffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// TestMemoryLimit: a VMM that takes more than its limit is killed, and is told so; its neighbour is not.
func TestMemoryLimit(t *testing.T) {
	program := hostileProgram(t)
	r := newRig(t, func(c *Config) { c.OverheadMiB = 32 })
	neighbor := r.cell(t, 16)
	other := launchOrFail(t, neighbor, vmm.Command{Args: []string{program, "sleep"}})
	c := r.cell(t, 16)
	p := launchOrFail(t, c, vmm.Command{Args: []string{program, "memory"}})
	waitDone(t, p)
	if !errors.Is(p.Err(), ErrMemory) || !strings.Contains(p.Err().Error(), "48 MiB") {
		t.Errorf("Err is %v", p.Err())
	}
	if err := other.Err(); err != nil {
		t.Errorf("the neighbour ended: %v", err)
	}
	select {
	case <-other.Done():
		t.Error("the neighbour ended")
	default:
	}
}

// TestForkBomb: a VMM has no more processes than it may, and all of them end with it.
func TestForkBomb(t *testing.T) {
	program := hostileProgram(t)
	r := newRig(t, func(c *Config) { c.Pids = 40 })
	c := r.cell(t, 512)
	var out buffer
	p := launchOrFail(t, c, vmm.Command{Args: []string{program, "fork"}, Stderr: &out})
	deadline := time.Now().Add(20 * time.Second)
	for !strings.Contains(out.String(), "children") {
		if time.Now().After(deadline) {
			t.Fatalf("no word from the fork bomb: %q, %v", out.String(), p.Err())
		}
		time.Sleep(5 * time.Millisecond)
	}
	pids, err := c.cgroup.pids()
	if err != nil {
		t.Fatal(err)
	}
	if len(pids) < 3 || len(pids) > 40 {
		t.Errorf("%d processes", len(pids))
	}
	if err := p.Kill(); err != nil {
		t.Error(err)
	}
	waitDone(t, p)
	for _, pid := range pids {
		if _, err := os.Stat(fmt.Sprintf("/proc/%d", pid)); err == nil {
			t.Errorf("process %d is there after Done", pid)
		}
	}
	if !errors.Is(p.Err(), ErrKilled) {
		t.Errorf("Err is %v", p.Err())
	}
}

// TestFlood: a VMM that writes without end is not held up, and the receiver gets a bounded part.
func TestFlood(t *testing.T) {
	program := hostileProgram(t)
	r := newRig(t)
	c := r.cell(t, 64)
	var out buffer
	p := launchOrFail(t, c, vmm.Command{Args: []string{program, "flood"}, Stderr: &out})
	deadline := time.Now().Add(20 * time.Second)
	for written := int64(0); written < 4*outputLimit; written = writtenBy(t, p.Pid()) {
		if time.Now().After(deadline) {
			t.Fatalf("only %d bytes were taken from the program", written)
		}
		time.Sleep(time.Millisecond)
	}
	if err := p.Kill(); err != nil {
		t.Error(err)
	}
	waitDone(t, p)
	if n := len(out.String()); n != outputLimit {
		t.Errorf("the receiver got %d bytes, not %d", n, outputLimit)
	}
	if n := len(p.(*process).out.lastLine()); n == 0 || n > lineLimit {
		t.Errorf("the last line has %d bytes", n)
	}
}

// writtenBy is how many bytes a process has written, by the kernel's count.
func writtenBy(t *testing.T, pid int) int64 {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/io", pid))
	if err != nil {
		t.Fatal(err)
	}
	var read, written int64
	if _, err := fmt.Sscanf(string(b), "rchar: %d\nwchar: %d", &read, &written); err != nil {
		t.Fatal(err)
	}
	return written
}
