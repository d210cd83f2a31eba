package vmmtest

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/ephemeral-run/ephemeral/images"
	"github.com/ephemeral-run/ephemeral/vmm"
)

// Harness is a driver with what the suite needs around it. Driver and Image are required.
type Harness struct {
	Driver vmm.Driver
	Image  images.Image
	// Shape of the machines; zero: 1 vCPU, 512 MiB.
	Shape vmm.Shape
	// Launcher gives the launcher of one machine, whose directory exists; nil: a plain one.
	Launcher func(t testing.TB, id, dir string) vmm.Launcher
	// NIC gives the network card of one machine; nil: machines have none.
	NIC func(t testing.TB, id string) *vmm.NIC
	// Slow multiplies time limits, which are made for hardware virtualisation on an idle host; 0: 10 with emulation,
	// 2 without.
	Slow float64
	// Clones are made of one template one after another, AtOnce of them alive together; 0: 20 and 12.
	Clones, AtOnce int
	// TemplateAge is how long a template's guest runs before the template is taken; 0: no longer than it takes.
	TemplateAge time.Duration
	// MostPrivate is the most bytes of its own that a clone may have that has run small commands; 0: any.
	MostPrivate int64
	// StreamBytes travel each way over one connection; 0: 64 MiB.
	StreamBytes int64
	// Guest makes the guest end in its ways; nil: the agent is asked, and runs commands as root.
	Guest Guest
	// LeaveOut names checks that make no sense for this driver, with the reason, which is told.
	LeaveOut map[string]string
}

// Guest ends a guest from inside.
type Guest interface {
	PowerOff(ctx context.Context, a *Agent) error
	Reboot(ctx context.Context, a *Agent) error
	Panic(ctx context.Context, a *Agent) error
}

// Image is the one that EPHEMERAL_TEST_IMAGE names, or that `make image` builds, as seen from a driver's directory.
func Image(t testing.TB) images.Image {
	t.Helper()
	dir := os.Getenv("EPHEMERAL_TEST_IMAGE")
	if dir == "" {
		dir = filepath.Join("..", "..", "build", "images", "base")
	}
	img, err := images.Open(dir)
	if err != nil {
		t.Fatalf("%v: run make image", err)
	}
	return img
}

// suite is a harness in use.
type suite struct {
	Harness
	template vmm.Template
}

// linuxGuest ends a Linux guest. The calls do not return, since the guest ends with them.
type linuxGuest struct{}

func (linuxGuest) PowerOff(ctx context.Context, a *Agent) error { return a.Shutdown(ctx) }
func (linuxGuest) Reboot(ctx context.Context, a *Agent) error   { return sysrq(ctx, a, "b") }
func (linuxGuest) Panic(ctx context.Context, a *Agent) error    { return sysrq(ctx, a, "c") }

func sysrq(ctx context.Context, a *Agent, key string) error {
	return a.Run(ctx, nil, io.Discard, "sh", "-c", "echo "+key+" >/proc/sysrq-trigger; sleep 60")
}

func (h Harness) withDefaults() Harness {
	if h.Shape == (vmm.Shape{}) {
		h.Shape = vmm.Shape{VCPUs: 1, MemoryMiB: 512}
	}
	if h.Launcher == nil {
		h.Launcher = func(testing.TB, string, string) vmm.Launcher { return &Launcher{} }
	}
	if h.Slow == 0 {
		h.Slow = 2
		if h.Driver.Isolation() == vmm.Emulated {
			h.Slow = 10
		}
	}
	if h.Clones == 0 {
		h.Clones = 20
	}
	if h.AtOnce == 0 {
		h.AtOnce = 12
	}
	if h.StreamBytes == 0 {
		h.StreamBytes = 64 << 20
	}
	if h.Guest == nil {
		h.Guest = linuxGuest{}
	}
	return h
}

// limit is a time limit on this driver.
func (h Harness) limit(d time.Duration) time.Duration { return time.Duration(float64(d) * h.Slow) }

// within is a context for something that takes d on an idle host with hardware virtualisation.
func (h Harness) within(t testing.TB, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), h.limit(d))
	t.Cleanup(cancel)
	return ctx
}

// How long things take at most, with hardware virtualisation on an idle host.
const (
	bootTime = 10 * time.Second
	callTime = 3 * time.Second
	endTime  = time.Second
)

// spec is that of a new machine with a directory of its own.
func (h Harness) spec(t testing.TB) vmm.Spec {
	t.Helper()
	var random [6]byte
	if _, err := rand.Read(random[:]); err != nil {
		t.Fatal(err)
	}
	id := hex.EncodeToString(random[:])
	dir := filepath.Join(t.TempDir(), id)
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	s := vmm.Spec{ID: id, Dir: dir, Image: h.Image, Shape: h.Shape, Launcher: h.Launcher(t, id, dir)}
	if h.NIC != nil {
		s.NIC = h.NIC(t, id)
	}
	return s
}

// boot starts a machine that ends with the test at the latest.
func (h Harness) boot(t testing.TB, change func(*vmm.Spec)) vmm.Machine {
	t.Helper()
	s := h.spec(t)
	if change != nil {
		change(&s)
	}
	m, err := h.Driver.Boot(h.within(t, callTime), s)
	if err != nil {
		t.Fatal(err)
	}
	closeAfter(t, m)
	return m
}

// Clone makes a running clone that ends with the test at the latest.
func (h Harness) Clone(t testing.TB, tpl vmm.Template) vmm.Machine {
	t.Helper()
	s := &suite{Harness: h.withDefaults(), template: tpl}
	m := s.restore(t)
	if err := m.Resume(s.within(t, callTime)); err != nil {
		t.Fatal(err)
	}
	return m
}

// restore makes a clone, paused, that ends with the test at the latest.
func (s *suite) restore(t testing.TB) vmm.Machine {
	t.Helper()
	m, err := s.Driver.Restore(s.within(t, callTime), s.template, s.spec(t))
	if err != nil {
		t.Fatal(err)
	}
	closeAfter(t, m)
	return m
}

// running makes a clone that answers.
func (s *suite) running(t testing.TB) (vmm.Machine, *Agent) {
	t.Helper()
	m := s.restore(t)
	if err := m.Resume(s.within(t, callTime)); err != nil {
		t.Fatal(err)
	}
	a := NewAgent(m.Dial)
	if err := a.Ping(s.within(t, callTime)); err != nil {
		t.Fatalf("clone does not answer: %v", err)
	}
	return m, a
}

func closeAfter(t testing.TB, m vmm.Machine) {
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})
}

// MakeTemplate boots a machine, warms it and makes a template of it in dir, which exists. Its key is not set.
func (h Harness) MakeTemplate(t testing.TB, dir string) vmm.Template {
	t.Helper()
	h = h.withDefaults()
	tpl := vmm.Template{
		Dir: dir, RAM: filepath.Join(dir, "ram"), Image: h.Image, Shape: h.Shape,
		Driver: h.Driver.Name(), Version: h.Driver.Version(),
	}
	m := h.boot(t, func(s *vmm.Spec) { s.RAM = tpl.RAM })
	a := NewAgent(m.Dial)
	if err := a.Ping(h.within(t, bootTime)); err != nil {
		t.Fatalf("template does not answer: %v", err)
	}
	h.mark(t, a)
	time.Sleep(h.TemplateAge)
	if err := h.freeze(t, m, dir); err != nil {
		t.Fatal(err)
	}
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
	if err := fill(tpl.RAM, int64(h.Shape.MemoryMiB)<<20); err != nil {
		t.Fatal(err)
	}
	tpl.MadeAt = time.Now()
	return tpl
}

// inheritance is a file that every clone finds as its template had it.
const inheritance = "/run/of-template"

// mark warms a template's guest and leaves a trace in its memory.
func (h Harness) mark(t testing.TB, a *Agent) {
	t.Helper()
	for _, command := range []string{"echo template >" + inheritance, "head -c 100000 /dev/zero | sha256sum", "python3 -c 'print(1)'"} {
		if err := a.Run(h.within(t, callTime), nil, io.Discard, "sh", "-c", command); err != nil {
			t.Fatal(err)
		}
	}
}

func (h Harness) freeze(t testing.TB, m vmm.Machine, dir string) error {
	t.Helper()
	if err := m.Disconnect(); err != nil {
		return err
	}
	if err := m.Pause(h.within(t, callTime)); err != nil {
		return err
	}
	return m.Snapshot(h.within(t, callTime), dir)
}

// Times of a machine, measured from the begin of its making.
type Times struct {
	Ready time.Duration // the agent has answered a Ping
	Exec  time.Duration // and then run a first command
}

// TimeClone makes a clone with the driver, measures and closes it.
func (h Harness) TimeClone(ctx context.Context, t testing.TB, tpl vmm.Template) (Times, error) {
	t.Helper()
	h = h.withDefaults()
	spec := h.spec(t)
	begin := time.Now()
	m, err := h.Driver.Restore(ctx, tpl, spec)
	if err != nil {
		return Times{}, err
	}
	times, err := timeAgent(ctx, NewAgent(m.Dial), begin, m.Resume)
	return times, errors.Join(err, m.Close())
}

// TimeBoot boots a machine with the driver, measures and closes it.
func (h Harness) TimeBoot(ctx context.Context, t testing.TB) (Times, error) {
	t.Helper()
	h = h.withDefaults()
	spec := h.spec(t)
	begin := time.Now()
	m, err := h.Driver.Boot(ctx, spec)
	if err != nil {
		return Times{}, err
	}
	times, err := timeAgent(ctx, NewAgent(m.Dial), begin, func(context.Context) error { return nil })
	return times, errors.Join(err, m.Close())
}

func timeAgent(ctx context.Context, a *Agent, begin time.Time, resume func(context.Context) error) (times Times, err error) {
	if err := resume(ctx); err != nil {
		return times, err
	}
	if err := a.Ping(ctx); err != nil {
		return times, err
	}
	times.Ready = time.Since(begin)
	if err := a.Run(ctx, nil, io.Discard, "/bin/true"); err != nil {
		return times, err
	}
	times.Exec = time.Since(begin)
	return times, nil
}

// fill allocates the holes of a file and protects it.
func fill(path string, size int64) error {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	if err := unix.Fallocate(int(f.Fd()), 0, 0, size); err != nil {
		return fmt.Errorf("fill %s: %w", path, err)
	}
	return f.Chmod(0o444)
}

// checksum of a file.
func checksum(t testing.TB, path string) string {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	sum := sha256.New()
	if _, err := io.Copy(sum, f); err != nil {
		t.Fatal(err)
	}
	return hex.EncodeToString(sum.Sum(nil))
}

// LeavesNothing fails a test at whose end there are processes, descriptors or goroutines that were not there before.
func LeavesNothing(t *testing.T) {
	t.Helper()
	leavesNothing(t)
}

// leavesNothing compares processes, descriptors and goroutines at the end of a test with those at its begin.
func leavesNothing(t *testing.T) {
	t.Helper()
	_ = thread() // of the launcher: it stays
	before, files := children(t), len(descriptors(t))
	others := goleak.IgnoreCurrent()
	t.Cleanup(func() {
		if err := goleak.Find(others); err != nil {
			t.Errorf("goroutines are left: %v", err)
		}
		eventually(t, endTime, func() error {
			for _, pid := range children(t) {
				if !slices.Contains(before, pid) {
					return fmt.Errorf("process %d is left", pid)
				}
			}
			if now := descriptors(t); len(now) > files {
				return fmt.Errorf("%d descriptors where %d were: %q", len(now), files, now)
			}
			return nil
		})
	})
}

func eventually(t testing.TB, within time.Duration, check func() error) {
	t.Helper()
	deadline := time.Now().Add(within)
	for {
		err := check()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Error(err)
			return
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// children are the descendants of this process, also those that have ended and were not waited for.
func children(t testing.TB) []int {
	t.Helper()
	entries, err := os.ReadDir("/proc")
	if err != nil {
		t.Fatal(err)
	}
	parents := make(map[int]int)
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		stat, err := os.ReadFile(filepath.Join("/proc", e.Name(), "stat"))
		if err != nil {
			continue // it has ended
		}
		// After the name, which ends with the last parenthesis: state, parent.
		fields := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))
		if len(fields) > 1 {
			parents[pid], _ = strconv.Atoi(fields[1])
		}
	}
	var below []int
	for pid := range parents {
		for up := parents[pid]; up > 1; up = parents[up] {
			if up == os.Getpid() {
				below = append(below, pid)
				break
			}
		}
	}
	return below
}

// descriptors are what this process has open.
func descriptors(t testing.TB) []string {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	var open []string
	for _, e := range entries {
		if target, err := os.Readlink("/proc/self/fd/" + e.Name()); err == nil {
			open = append(open, target)
		}
	}
	return open
}
