package jail

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/ephemeral-run/ephemeral/vmm"
)

// TestCommandLine asserts the whole command line.
func TestCommandLine(t *testing.T) {
	r := newRig(t)
	c := r.cell(t, 64)
	file, err := os.Open("/dev/null")
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	dir := tempDir(t)
	machine, given := filepath.Join(dir, "1"), filepath.Join(dir, "2")
	for _, d := range []string{machine, given} {
		if err := os.Mkdir(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	inner := filepath.Join(given, "in")
	if err := os.Mkdir(inner, 0o755); err != nil {
		t.Fatal(err)
	}
	l, err := c.prepare(vmm.Command{
		Args: []string{"/usr/bin/true", "-a", "b c"}, Files: []*os.File{file},
		ReadOnly: []string{"/usr/share/qemu", given}, Writable: []string{machine, inner}, Devices: []string{"/dev/full"},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer l.close()
	want := `prlimit --nofile=1024 --core=0 --msgqueue=0 --rtprio=0 bwrap
--unshare-user --unshare-pid --unshare-ipc --unshare-uts --unshare-cgroup --as-pid-1 --die-with-parent --hostname machine
--info-fd 4 --block-fd 5 --seccomp 6
--dev-bind /dev/full /dev/full
--dev-bind /dev/null /dev/null
--dev-bind /dev/random /dev/random
--dev-bind /dev/urandom /dev/urandom
--dev-bind /dev/zero /dev/zero
--ro-bind /etc/ld.so.cache /etc/ld.so.cache
--symlink usr/lib /lib
--symlink usr/lib64 /lib64
--bind MACHINE MACHINE
--ro-bind GIVEN GIVEN
--bind GIVEN/in GIVEN/in
--ro-bind /usr/bin/true /usr/bin/true
--ro-bind /usr/lib/x86_64-linux-gnu /usr/lib/x86_64-linux-gnu
--ro-bind /usr/lib64 /usr/lib64
--ro-bind /usr/share/qemu /usr/share/qemu
--remount-ro / --chdir MACHINE -- /usr/bin/true -a b c`
	var got strings.Builder
	for i, arg := range l.cmd.Args {
		switch {
		case i == 0, arg == r.bubblewrap:
			arg = filepath.Base(arg)
		case strings.HasPrefix(arg, machine):
			arg = "MACHINE" + strings.TrimPrefix(arg, machine)
		case strings.HasPrefix(arg, given):
			arg = "GIVEN" + strings.TrimPrefix(arg, given)
		}
		switch {
		case arg == "--unshare-user", arg == "--info-fd", strings.HasSuffix(arg, "bind"), arg == "--symlink", arg == "--remount-ro":
			got.WriteString("\n")
		case i > 0:
			got.WriteString(" ")
		}
		got.WriteString(arg)
	}
	if diff := cmp.Diff(strings.Split(want, "\n"), strings.Split(got.String(), "\n")); diff != "" {
		t.Errorf("command line (-want +got):\n%s", diff)
	}
	if want := []string{"LANG=C", "TMPDIR=" + machine}; !slices.Equal(l.cmd.Env, want) {
		t.Errorf("environment %q", l.cmd.Env)
	}
	if len(l.cmd.ExtraFiles) != 4 || l.cmd.ExtraFiles[0] != file {
		t.Errorf("descriptors %v", l.cmd.ExtraFiles)
	}
}

// TestOpenFiles: a program that needs more descriptors than machines get has them.
func TestOpenFiles(t *testing.T) {
	r := newRig(t)
	c := r.cell(t, 64)
	for needed, want := range map[int]string{0: "--nofile=1024", 100: "--nofile=1024", 4096: "--nofile=4096"} {
		l, err := c.prepare(vmm.Command{Args: []string{"/usr/bin/true"}, OpenFiles: needed})
		if err != nil {
			t.Fatal(err)
		}
		if got := l.cmd.Args[1]; got != want {
			t.Errorf("%d needed: %s, want %s", needed, got, want)
		}
		l.close()
	}
}

// TestLaunchFails: a launch that cannot succeed says why, and leaves nothing.
func TestLaunchFails(t *testing.T) {
	program := hostileProgram(t)
	r := newRig(t)
	private := filepath.Join(t.TempDir(), "file") // its parents are for root alone
	if err := os.WriteFile(private, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(tempDir(t), "link")
	if err := os.Symlink("/etc", link); err != nil {
		t.Fatal(err)
	}
	plain := filepath.Join(tempDir(t), "plain")
	if err := os.WriteFile(plain, []byte("#!/nonexistent\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	device := filepath.Join(tempDir(t), "device")
	if err := unix.Mknod(device, unix.S_IFCHR|0o600, int(unix.Mkdev(1, 3))); err != nil {
		t.Fatal(err)
	}
	for name, test := range map[string]struct {
		command vmm.Command
		want    string
		is      error
	}{
		"no program":            {vmm.Command{}, "not absolute", nil},
		"relative program":      {vmm.Command{Args: []string{"true"}}, "not absolute", nil},
		"missing program":       {vmm.Command{Args: []string{"/nonexistent"}}, "/nonexistent", fs.ErrNotExist},
		"program is directory":  {vmm.Command{Args: []string{"/usr"}}, "/usr", fs.ErrPermission},
		"program no executable": {vmm.Command{Args: []string{plain}}, plain, fs.ErrPermission},
		"nil file":              {vmm.Command{Args: []string{program}, Files: []*os.File{nil}}, "file 0", nil},
		"relative path":         {vmm.Command{Args: []string{program}, ReadOnly: []string{"etc"}}, `"etc"`, nil},
		"path with dots":        {vmm.Command{Args: []string{program}, ReadOnly: []string{"/usr/../etc"}}, `"/usr/../etc"`, nil},
		"whole root":            {vmm.Command{Args: []string{program}, Writable: []string{"/"}}, `"/"`, nil},
		"missing path":          {vmm.Command{Args: []string{program}, ReadOnly: []string{"/nonexistent"}}, "/nonexistent", fs.ErrNotExist},
		"unreachable path":      {vmm.Command{Args: []string{program}, ReadOnly: []string{private}}, "Permission denied", nil},
		"both":                  {vmm.Command{Args: []string{program}, ReadOnly: []string{"/srv"}, Writable: []string{"/srv"}}, "two things", nil},
		"missing device":        {vmm.Command{Args: []string{program}, Devices: []string{"/dev/nonexistent"}}, "nonexistent", fs.ErrNotExist},
		"no device":             {vmm.Command{Args: []string{program}, Devices: []string{plain}}, "no device", nil},
		"root's device":         {vmm.Command{Args: []string{program}, Devices: []string{device}}, "chgrp", nil},
		"writable is file":      {vmm.Command{Args: []string{program}, Writable: []string{plain}}, "directory", nil},
		"writable is link":      {vmm.Command{Args: []string{program}, Writable: []string{link}}, "directory", nil},
		"writable is missing":   {vmm.Command{Args: []string{program}, Writable: []string{"/nonexistent"}}, "/nonexistent", fs.ErrNotExist},
	} {
		t.Run(name, func(t *testing.T) {
			c := r.cell(t, 64)
			p, err := c.Launch(t.Context(), test.command)
			if err == nil {
				t.Fatalf("launched process %d", p.Pid())
			}
			if !strings.Contains(err.Error(), test.want) {
				t.Errorf("error %q does not say %q", err, test.want)
			}
			if test.is != nil && !errors.Is(err, test.is) {
				t.Errorf("error %q is not %q", err, test.is)
			}
			checkEmpty(t, c)
		})
	}
}

// checkEmpty says that a cell has no process, and that the next one can be launched.
func checkEmpty(t *testing.T, c *Cell) {
	t.Helper()
	if pids, err := c.cgroup.pids(); err != nil || len(pids) != 0 {
		t.Errorf("processes %v, %v", pids, err)
	}
	c.mu.Lock()
	if len(c.running) != 0 {
		t.Errorf("%d processes in the books", len(c.running))
	}
	c.mu.Unlock()
	p := launchOrFail(t, c, vmm.Command{Args: []string{"/usr/bin/true"}})
	waitDone(t, p)
	if err := p.Err(); err != nil {
		t.Error(err)
	}
}

// TestBrokenBubblewrap: whatever bubblewrap does instead of its work, Launch ends with an error and nothing is left.
func TestBrokenBubblewrap(t *testing.T) {
	for name, test := range map[string]struct{ script, want string }{
		"fails":        {"echo no permission >&2; exit 1", "no permission"},
		"ends well":    {"exit 0", "no process"},
		"hangs":        {"exec sleep 1000", "deadline"},
		"hangs, forks": {"sleep 1000 & exec 4>&-; wait", "deadline"},
		"no program":   {"", "no process"},
	} {
		t.Run(name, func(t *testing.T) {
			script := filepath.Join(tempDir(t), "bwrap")
			content := "#!/bin/sh\n" + test.script + "\n"
			if test.script == "" {
				content = "no program"
			}
			if err := os.WriteFile(script, []byte(content), 0o755); err != nil {
				t.Fatal(err)
			}
			r := newRig(t, func(c *Config) { c.Bubblewrap = script })
			c := r.cell(t, 64)
			patience := 20 * time.Second
			if test.want == "deadline" {
				patience = 200 * time.Millisecond
			}
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			p, err := c.Launch(ctx, vmm.Command{Args: []string{"/usr/bin/true"}})
			if err == nil {
				t.Fatalf("launched process %d", p.Pid())
			}
			if !strings.Contains(err.Error(), test.want) {
				t.Errorf("error %q does not say %q", err, test.want)
			}
			if pids, err := c.cgroup.pids(); err != nil || len(pids) != 0 {
				t.Errorf("processes %v, %v", pids, err)
			}
		})
	}
}

// TestEnd: how a program ends is what Err says.
func TestEnd(t *testing.T) {
	r := newRig(t)
	c := r.cell(t, 64)
	for name, test := range map[string]struct{ script, want string }{
		"exit code 0":   {"exit 0", ""},
		"exit code 7":   {"echo first; echo last words >&2; exit 7", `exit status 7: "last words"`},
		"no words":      {"exit 2", "exit status 2"},
		"exit code 143": {"exit 143", "signal: terminated"},
	} {
		t.Run(name, func(t *testing.T) {
			p := launchOrFail(t, c, vmm.Command{Args: []string{"/bin/bash", "-c", test.script}})
			waitDone(t, p)
			got := ""
			if p.Err() != nil {
				got = p.Err().Error()
			}
			if got != test.want {
				t.Errorf("Err is %q, not %q", got, test.want)
			}
		})
	}
	p := launchOrFail(t, c, vmm.Command{Args: []string{hostileProgram(t), "sleep"}})
	if err := unix.Kill(p.Pid(), unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	waitDone(t, p)
	if err := p.Err(); err == nil || err.Error() != "signal: killed" {
		t.Errorf("killed by somebody else: Err is %v", err)
	}
}

// TestCancel: when the context ends during a launch, at whatever moment, nothing is left; afterwards it means nothing.
func TestCancel(t *testing.T) {
	program := hostileProgram(t)
	r := newRig(t)
	c := r.cell(t, 64)
	cancelled, launched := 0, 0
	for i := range 40 {
		ctx, cancel := context.WithCancel(t.Context())
		timer := time.AfterFunc(time.Duration(i)*300*time.Microsecond, cancel)
		p, err := c.Launch(ctx, vmm.Command{Args: []string{program, "sleep"}})
		switch {
		case err == nil:
			launched++
			cancel()
			select {
			case <-p.Done():
				t.Errorf("round %d: the context ended the process after Launch had returned: %v", i, p.Err())
			case <-time.After(time.Millisecond):
			}
			if err := p.Kill(); err != nil {
				t.Error(err)
			}
			waitDone(t, p)
		case errors.Is(err, context.Canceled):
			cancelled++
		default:
			t.Errorf("round %d: %v", i, err)
		}
		timer.Stop()
		cancel()
		if pids, err := c.cgroup.pids(); err != nil || len(pids) != 0 {
			t.Fatalf("round %d: processes %v, %v", i, pids, err)
		}
	}
	t.Logf("%d cancelled, %d launched", cancelled, launched)
	if cancelled == 0 {
		t.Error("no launch was cancelled")
	}
}

// TestClose: Close ends everything, once, also while launches are under way.
func TestClose(t *testing.T) {
	program := hostileProgram(t)
	r := newRig(t)
	var wg sync.WaitGroup
	for i := range 12 {
		wg.Go(func() {
			c, err := r.New(fmt.Sprint("cell-", i), Options{MemoryMiB: 32, Netns: r.network})
			if err != nil {
				t.Error(err)
				return
			}
			var inner sync.WaitGroup
			for range 2 {
				inner.Go(func() {
					p, err := c.Launch(t.Context(), vmm.Command{Args: []string{program, "sleep"}})
					if err != nil && !errors.Is(err, ErrClosed) {
						t.Error(err)
					}
					if err == nil {
						<-p.Done()
						if !errors.Is(p.Err(), ErrKilled) {
							t.Errorf("Err is %v", p.Err())
						}
					}
				})
			}
			time.Sleep(time.Duration(i) * 3 * time.Millisecond)
			for range 2 {
				inner.Go(func() {
					if err := c.Close(); err != nil {
						t.Error(err)
					}
				})
			}
			inner.Wait()
			if _, err := c.Launch(t.Context(), vmm.Command{Args: []string{program, "sleep"}}); !errors.Is(err, ErrClosed) {
				t.Errorf("launch in a closed cell: %v", err)
			}
		})
	}
	wg.Wait()
	if left, err := r.cgroups.list(); err != nil || len(left) != 0 {
		t.Errorf("cgroups %v, %v", left, err)
	}
	if used := slices.Index(r.uids.used, true); used >= 0 {
		t.Errorf("user id %d is in use", r.config.FirstUID+used)
	}
}

// TestJailClose: closing the jail closes its cells, and it makes no more.
func TestJailClose(t *testing.T) {
	r := newRig(t)
	c := r.cell(t, 32)
	p := launchOrFail(t, c, vmm.Command{Args: []string{hostileProgram(t), "sleep"}})
	for range 2 {
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	}
	waitDone(t, p)
	if _, err := r.New("cell", Options{MemoryMiB: 32, Netns: r.network}); !errors.Is(err, ErrClosed) {
		t.Errorf("New: %v", err)
	}
	if _, err := r.RemoveStale(t.Context()); !errors.Is(err, ErrClosed) {
		t.Errorf("RemoveStale: %v", err)
	}
}

// TestNetworkClosed: without the node's network nothing is launched.
func TestNetworkClosed(t *testing.T) {
	r := newRig(t)
	c := r.cell(t, 32)
	p := launchOrFail(t, c, vmm.Command{Args: []string{hostileProgram(t), "sleep"}})
	if err := r.network.Close(); err != nil {
		t.Fatal(err)
	}
	waitDone(t, p) // the thread that started it has ended
	if _, err := c.Launch(t.Context(), vmm.Command{Args: []string{"/usr/bin/true"}}); err == nil {
		t.Error("launched without a network namespace")
	}
}

func TestOutput(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var to strings.Builder
		o := newOutput(&to)
		var all []byte
		for _, b := range rapid.SliceOf(rapid.SliceOfN(rapid.Byte(), 0, 30_000)).Draw(t, "writes") {
			if n, err := o.Write(b); n != len(b) || err != nil {
				t.Fatalf("Write: %d, %v", n, err)
			}
			all = append(all, b...)
		}
		if want := string(all[:min(len(all), outputLimit)]); to.String() != want {
			t.Fatalf("receiver got %d bytes, not the first %d", to.Len(), len(want))
		}
		tail := strings.TrimSpace(string(all[max(0, len(all)-lineLimit):]))
		if want := tail[strings.LastIndexByte(tail, '\n')+1:]; o.lastLine() != want {
			t.Fatalf("last line %q, not %q", o.lastLine(), want)
		}
	})
	o := newOutput(failing{})
	for range 3 {
		if n, err := o.Write([]byte("x")); n != 1 || err != nil {
			t.Errorf("a receiver that fails: %d, %v", n, err)
		}
	}
}

type failing struct{}

func (failing) Write([]byte) (int, error) { return 0, io.ErrClosedPipe }

func TestArrange(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		path := rapid.StringMatching(`(/[a-c]{1,2}){1,4}`)
		var in []mount
		for _, p := range rapid.SliceOfDistinct(path, rapid.ID[string]).Draw(t, "paths") {
			in = append(in, mount{kind: mountKind(rapid.IntRange(0, 2).Draw(t, "kind")), path: p})
		}
		out, err := arrange(in)
		if err != nil || len(out) != len(in) {
			t.Fatalf("%d of %d, %v", len(out), len(in), err)
		}
		for i, outer := range out {
			for _, inner := range out[:i] {
				if strings.HasPrefix(inner.path, outer.path+"/") {
					t.Fatalf("%s would hide %s", outer.path, inner.path)
				}
			}
		}
	})
}

// BenchmarkLaunch is a launch to the end of the program; BenchmarkExec the same without the jail.
func BenchmarkLaunch(b *testing.B) {
	r := newRig(b)
	c := r.cell(b, 64)
	for b.Loop() {
		p, err := c.Launch(b.Context(), vmm.Command{Args: []string{"/usr/bin/true"}})
		if err != nil {
			b.Fatal(err)
		}
		<-p.Done()
	}
}

func BenchmarkExec(b *testing.B) {
	for b.Loop() {
		if err := exec.Command("/usr/bin/true").Run(); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkCell makes and removes a cell.
func BenchmarkCell(b *testing.B) {
	r := newRig(b)
	for b.Loop() {
		c, err := r.New("cell", Options{MemoryMiB: 64, Netns: r.network})
		if err != nil {
			b.Fatal(err)
		}
		if err := c.Close(); err != nil {
			b.Fatal(err)
		}
	}
}
