package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ephemeral-run/ephemeral/client"
	"github.com/ephemeral-run/ephemeral/run"
	"github.com/ephemeral-run/ephemeral/run/pools"
	"github.com/ephemeral-run/ephemeral/test/smalldisk"
)

// ailing is a server whose host can be made to lack things, without anybody else on the host seeing it: the server has a
// mount namespace of its own, and its data directory is a file system of its own.
type ailing struct {
	*server
	image  string // directory
	tenant *tenant
}

// fault is what the host lacks.
type fault struct {
	name        string
	begin, mend func(*ailing) error
	says        []string // what the pool's report says, the fix among it
	long        bool     // in make chaos only: it takes another template
	refusesRuns bool     // they are refused with 503, because they could not be kept
}

// faults, each of which a server must say, outlive, and recover from by itself.
var faults = []fault{
	{name: "no file descriptors", begin: (*ailing).fewDescriptors, mend: (*ailing).manyDescriptors, says: []string{"file descriptors", "LimitNOFILE"}},
	{name: "no memory for one more machine", says: []string{"not enough free memory", "EPHEMERAL_MACHINE_MEMORY_MIB"},
		begin: inside("printf 'MemTotal: 8000000 kB\\nMemAvailable: 500000 kB\\n' > /run/meminfo-$$; mount --bind /run/meminfo-$$ /proc/meminfo; rm /run/meminfo-$$"),
		mend:  inside("umount /proc/meminfo")},
	{name: "no tun device", says: []string{"/dev/net/tun", "modprobe tun"},
		begin: inside("mount -t tmpfs none /dev/net"), mend: inside("umount /dev/net")},
	{name: "cgroups read-only", says: []string{"read-only", "make /sys/fs/cgroup writable"},
		begin: inside(eachCgroup("mount --bind $m $m; mount -o remount,bind,ro $m")), mend: inside(eachCgroup("umount $m"))},
	{name: "disk full", refusesRuns: true, begin: (*ailing).fillDisk, mend: (*ailing).freeDisk},
	{name: "template damaged, and no kernel to make another", says: []string{"vmlinuz", "ephemeral image build --rebuild"},
		begin: func(a *ailing) error {
			return errors.Join(os.Rename(filepath.Join(a.image, "vmlinuz"), filepath.Join(a.image, "away")), a.damageTemplate())
		},
		mend: func(a *ailing) error {
			return os.Rename(filepath.Join(a.image, "away"), filepath.Join(a.image, "vmlinuz"))
		}},
	{name: "template damaged, and no space for another", long: true, begin: (*ailing).leaveNoSpaceForTemplate, mend: (*ailing).freeDisk,
		says: []string{"no space left on device", "free space, and inodes, on the file system of EPHEMERAL_DATA_DIR"}},
	{name: "template damaged", long: true, begin: (*ailing).damageTemplate, mend: func(*ailing) error { return nil }},
}

// TestFaults takes from a running server what it needs of its host, one thing after the other. It says what is missing and
// what to do about it, answers meanwhile, and carries out the runs that it accepted as soon as the thing is back: the same
// process, and nothing is left behind.
func TestFaults(t *testing.T) {
	a := newAiling(t)
	pid := a.cmd.Process.Pid
	for _, f := range faults {
		if f.long && os.Getenv("EPHEMERAL_CHAOS") == "" {
			continue
		}
		if !t.Run(f.name, func(t *testing.T) { a.suffer(t, f) }) {
			t.Fatalf("the log:\n%s", lastLines(a.cmd.Stderr.(*locked).String(), 150))
		}
	}
	select {
	case err := <-a.ended:
		t.Errorf("the server ended: %v", err)
	default:
	}
	if a.cmd.Process.Pid != pid {
		t.Error("the server was restarted")
	}
	out, errs, err := a.cli(t.Context(), nil, "orgs", "audit")
	if err != nil || !strings.Contains(out, "conserved") {
		t.Errorf("audit: %v\n%s%s", err, out, errs)
	}
}

// suffer begins a fault and mends it again.
func (a *ailing) suffer(t *testing.T, f fault) {
	a.await(t, "a machine is ready", func(r pools.Report) bool { return r.Ready == 1 && r.State == "serving" })
	began := time.Now()
	if err := f.begin(a); err != nil {
		t.Fatal(err)
	}
	mended := false
	mend := func() {
		if !mended {
			mended = true
			if err := f.mend(a); err != nil {
				t.Error(err)
			}
		}
	}
	defer mend()
	var accepted []run.ID
	if f.refusesRuns {
		a.checkRefused(t)
	} else {
		for range 2 { // the first has the machine that is ready; then another one has to be made
			created, err := a.tenant.CreateRun(t.Context(), client.Request{Command: "true"}, client.CreateOptions{})
			if err != nil {
				t.Fatal(err)
			}
			accepted = append(accepted, created.Run.ID)
		}
	}
	if len(f.says) > 0 {
		said := a.await(t, fmt.Sprintf("it says %q", f.says), func(r pools.Report) bool { return says(r, f.says) })
		t.Logf("after %s: %s", time.Since(began).Round(time.Millisecond), strings.Join([]string{said.State, said.Admission, said.CircuitReason, said.Reason}, " | "))
	}
	began = time.Now()
	if _, err := a.tenant.Account(t.Context()); err != nil || time.Since(began) > 5*time.Second {
		t.Errorf("the gateway answers after %s: %v", time.Since(began), err)
	}
	mend()
	began = time.Now()
	for _, id := range accepted {
		if r := a.tenant.ended(t, id); r.State != run.Succeeded {
			t.Errorf("a run that was accepted meanwhile ended %s, %+v", r.State, r.Error)
		}
	}
	if r := a.tenant.finish(t, client.Request{Command: "true"}); r.State != run.Succeeded {
		t.Errorf("a run after that ended %s, %+v", r.State, r.Error)
	}
	t.Logf("well again after %s", time.Since(began).Round(time.Millisecond))
	var left remains
	var err error
	eventually(t, 20*time.Second, "there is nothing but the pool's machine", func() bool {
		left, err = a.lookAround()
		return err == nil && left.whole() == nil && len(left.ids()) == 1
	})
	if t.Failed() {
		t.Logf("there is %+v, %v", left, err)
	}
}

// says tells whether a report has all the words, of why no machine is made.
func says(r pools.Report, words []string) bool {
	text := r.Admission + " " + r.CircuitReason + " " + r.Reason
	for _, w := range words {
		if !strings.Contains(text, w) {
			return false
		}
	}
	return true
}

// await waits for a report of the pool.
func (a *ailing) await(t *testing.T, what string, good func(pools.Report) bool) (last pools.Report) {
	t.Helper()
	for end := time.Now().Add(runLimit); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
		var all []pools.Pool
		if err := a.show(&all); err == nil && len(all) == 1 && len(all[0].Nodes) == 1 {
			if last = all[0].Nodes[0]; good(last) {
				return last
			}
		}
	}
	t.Fatalf("not within %s: %s; the pool: %+v\n%s", runLimit, what, last, lastLines(a.cmd.Stderr.(*locked).String(), 60))
	return last
}

// checkRefused demands that a run which cannot be kept is refused, and that what is there can still be read.
func (a *ailing) checkRefused(t *testing.T) {
	t.Helper()
	var status int
	var answer map[string]any
	eventually(t, 20*time.Second, "a run is refused", func() bool {
		var header map[string][]string
		status, header, answer = a.tenant.post(t, `{"command": "true"}`, nil)
		return status == 503 && len(header["Retry-After"]) == 1
	})
	t.Logf("refused with %d: %v", status, answer)
	if answer["code"] != "storage_full" || !strings.Contains(fmt.Sprint(answer["remediation"]), "Idempotency-Key") {
		t.Errorf("refused with %v", answer)
	}
	eventually(t, 20*time.Second, "operators are told why", func() bool {
		return strings.Contains(a.cmd.Stderr.(*locked).String(), "no run is accepted or started until there is room")
	})
}

func newAiling(t *testing.T) *ailing {
	t.Helper()
	dir, err := os.MkdirTemp("", "eph-faults-")
	if err != nil {
		t.Fatal(err)
	}
	a := &ailing{image: filepath.Join(dir, "images", "base")}
	data := filepath.Join(dir, "data")
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(os.Chmod(dir, 0o711)) // machines run as other users, who have to pass through
	must(os.MkdirAll(filepath.Dir(a.image), 0o755))
	must(os.Mkdir(data, 0o711))
	changedImage(t, a.image, nil)
	must(unix.Mount("none", data, "tmpfs", 0, "mode=0711,size=1300m"))
	t.Cleanup(func() { must(unix.Unmount(data, 0)) })
	if out, err := exec.Command("cp", "-a", filepath.Join(shared.data, "templates"), data).CombinedOutput(); err != nil {
		t.Fatalf("copy the template: %v: %s", err, out)
	}
	a.server, err = newServer(data, "EPHEMERAL_IMAGE_DIR="+filepath.Dir(a.image), "EPHEMERAL_POOL_MAX_MACHINES=3",
		"EPHEMERAL_POOL_MIN_READY=1", "EPHEMERAL_POOL_MAX_READY=1", "EPHEMERAL_POOL_SPARES=0")
	must(err)
	a.within = []string{"unshare", "--mount", "--propagation", "slave"}
	must(a.launch())
	t.Cleanup(func() {
		if err := a.stop(); err != nil {
			t.Error(err)
		}
		if residue, err := a.residue(); err != nil || residue.Total() > 0 {
			t.Errorf("left behind: %+v, %v", residue, err)
		}
	})
	a.tenant = a.server.tenant(t, 1_000_000)
	return a
}

// inside runs a script in the server's mount namespace.
func inside(script string) func(*ailing) error {
	return func(a *ailing) error {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		out, err := exec.CommandContext(ctx, "nsenter", "--mount", "--target", fmt.Sprint(a.cmd.Process.Pid), "sh", "-ec", script).CombinedOutput()
		if err != nil {
			return fmt.Errorf("%s: %w: %s", script, err, out)
		}
		return nil
	}
}

// eachCgroup is a script that does something with each mount m of a cgroup file system.
func eachCgroup(do string) string {
	return "awk '$3 ~ /^cgroup/ { print $2 }' /proc/self/mounts | sort -u | while read m; do " + do + "; done"
}

// fewDescriptors leaves the server some files to open, but not as many as a machine takes.
func (a *ailing) fewDescriptors() error {
	open, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", a.cmd.Process.Pid))
	if err != nil {
		return err
	}
	var old unix.Rlimit
	if err := unix.Prlimit(a.cmd.Process.Pid, unix.RLIMIT_NOFILE, nil, &old); err != nil {
		return err
	}
	return unix.Prlimit(a.cmd.Process.Pid, unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: uint64(len(open)) + 50, Max: old.Max}, nil)
}

func (a *ailing) manyDescriptors() error {
	var old unix.Rlimit
	if err := unix.Prlimit(a.cmd.Process.Pid, unix.RLIMIT_NOFILE, nil, &old); err != nil {
		return err
	}
	return unix.Prlimit(a.cmd.Process.Pid, unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: old.Max, Max: old.Max}, nil)
}

// fillDisk writes to the data directory's file system until it is full.
func (a *ailing) fillDisk() error { return smalldisk.Fill(a.data) }

// leaveNoSpaceForTemplate damages the template, and leaves space for Redis, but not for a machine's memory.
func (a *ailing) leaveNoSpaceForTemplate() error {
	var disk unix.Statfs_t
	if err := unix.Statfs(a.data, &disk); err != nil {
		return err
	}
	f, err := os.Create(filepath.Join(a.data, smalldisk.Filler))
	if err != nil {
		return err
	}
	err = unix.Fallocate(int(f.Fd()), 0, 0, int64(disk.Bavail)*disk.Bsize-guestMiB<<20/4)
	return errors.Join(err, f.Close(), a.damageTemplate())
}

func (a *ailing) freeDisk() error { return os.Remove(filepath.Join(a.data, smalldisk.Filler)) }

// damageTemplate overwrites what the hypervisor left in the template, but not the machine's memory.
func (a *ailing) damageTemplate() error {
	files, err := filepath.Glob(filepath.Join(a.data, "templates", "*", "*"))
	for _, file := range files {
		if name := filepath.Base(file); name != "ram" && name != "manifest.json" {
			err = errors.Join(err, os.WriteFile(file, []byte(strings.Repeat("damaged ", 10_000)), 0o644))
		}
	}
	return err
}
