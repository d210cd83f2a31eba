package provision

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/ephemeral-run/ephemeral/images"
	"github.com/ephemeral-run/ephemeral/vmm"
	"github.com/ephemeral-run/ephemeral/vmm/jail"
	"github.com/ephemeral-run/ephemeral/vmm/network"
)

// stage plays host, driver and agent. It writes down what happens in order, counts what exists, and fails where told.
type stage struct {
	mu     sync.Mutex
	log    []string
	alive  map[string]int   // of each kind
	fail   map[string]error // by the name of what is done
	hang   map[string]bool  // by the name of what is done: until its context ends
	before func(what string)
	clocks int // how often one was set

	clocksWrong bool // unless they are set

	version, cpu string
	isolation    vmm.Isolation
}

func newStage() *stage {
	return &stage{
		alive: map[string]int{}, fail: map[string]error{}, hang: map[string]bool{},
		version: "7.2", cpu: "max", isolation: vmm.Emulated,
	}
}

func (s *stage) do(ctx context.Context, what string) error {
	s.mu.Lock()
	s.log = append(s.log, what)
	err, hang, before := s.fail[what], s.hang[what], s.before
	s.mu.Unlock()
	if before != nil {
		before(what)
	}
	if hang {
		<-ctx.Done()
		return context.Cause(ctx)
	}
	return err
}

func (s *stage) add(kind string, n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.alive[kind] += n
}

func (s *stage) events() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.log)
}

func (s *stage) count(what string) (n int) {
	for _, e := range s.events() {
		if e == what {
			n++
		}
	}
	return n
}

// empty fails the test when anything still exists.
func (s *stage) empty(t *testing.T, p *Provisioner) {
	t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	for kind, n := range s.alive {
		if n != 0 {
			t.Errorf("%d of kind %s left", n, kind)
		}
	}
	if left, err := os.ReadDir(filepath.Join(p.config.DataDir, "machines")); err != nil || len(left) != 0 {
		t.Errorf("in machines/: %v, %v", left, err)
	}
	if left, err := filepath.Glob(filepath.Join(p.config.DataDir, "templates", ".*")); err != nil || len(left) != 0 {
		t.Errorf("half-built templates: %v, %v", left, err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.ids) != 0 || len(p.open) != 0 {
		t.Errorf("the provisioner knows %d ids and %d machines", len(p.ids), len(p.open))
	}
}

// The host.

func (s *stage) cell(id string, _ int) (cell, error) {
	if err := s.do(context.Background(), "make jail"); err != nil {
		return nil, err
	}
	s.add("jail", 1)
	return &fakeCell{s: s}, nil
}

func (s *stage) tap(id string, uid int) (tap, error) {
	if err := s.do(context.Background(), "make tap"); err != nil {
		return nil, err
	}
	s.add("tap", 1)
	return &fakeTap{s: s, id: id}, nil
}

func (s *stage) removeStale(ctx context.Context) (Residue, error) {
	return Residue{}, s.do(ctx, "remove stale")
}

func (s *stage) close() error { return s.do(context.Background(), "close host") }

type fakeCell struct {
	s    *stage
	once sync.Once
}

func (c *fakeCell) UID() int { return os.Getuid() }

func (c *fakeCell) SetUrgent(urgent bool) error {
	if !urgent {
		return c.s.do(context.Background(), "settle")
	}
	return c.s.do(context.Background(), "hurry")
}

func (c *fakeCell) Launch(ctx context.Context, _ vmm.Command) (vmm.Process, error) {
	return nil, c.s.do(ctx, "launch")
}

func (c *fakeCell) Close() error {
	err := c.s.do(context.Background(), "close jail")
	c.once.Do(func() { c.s.add("jail", -1) })
	return err
}

type fakeTap struct {
	s    *stage
	id   string
	once sync.Once
}

func (f *fakeTap) nic() *vmm.NIC { return &vmm.NIC{Tap: "eph" + f.id} }

func (f *fakeTap) Counters() (int64, int64, error) { return 3, 180, nil }
func (f *fakeTap) Attempts() network.Attempts      { return network.Attempts{} }

func (f *fakeTap) Close() error {
	err := f.s.do(context.Background(), "close tap")
	f.once.Do(func() { f.s.add("tap", -1) })
	return err
}

// The driver.

func (s *stage) Name() string             { return "fake" }
func (s *stage) Version() string          { return s.version }
func (s *stage) CPUModel() string         { return s.cpu }
func (s *stage) Isolation() vmm.Isolation { return s.isolation }

func (s *stage) Boot(ctx context.Context, spec vmm.Spec) (vmm.Machine, error) {
	return s.machine(ctx, "boot", spec)
}

func (s *stage) Restore(ctx context.Context, t vmm.Template, spec vmm.Spec) (vmm.Machine, error) {
	if spec.Image != t.Image || spec.Shape != t.Shape || spec.RAM != "" {
		return nil, fmt.Errorf("restore got a spec that does not fit: %+v", spec)
	}
	return s.machine(ctx, "restore", spec)
}

func (s *stage) machine(ctx context.Context, what string, spec vmm.Spec) (vmm.Machine, error) {
	if info, err := os.Stat(spec.Dir); err != nil || info.Mode().Perm() != 0o700 {
		return nil, fmt.Errorf("machine's directory: %v, %v", info, err)
	}
	if spec.NIC.Tap != "eph"+spec.ID {
		return nil, fmt.Errorf("tap %s of machine %s", spec.NIC.Tap, spec.ID)
	}
	if _, err := spec.Launcher.Launch(ctx, vmm.Command{}); err != nil {
		return nil, err
	}
	if err := s.do(ctx, what); err != nil {
		return nil, err
	}
	if spec.RAM != "" {
		if err := os.WriteFile(spec.RAM, []byte("guest"), 0); err != nil {
			return nil, err
		}
		if err := os.Truncate(spec.RAM, int64(spec.Shape.MemoryMiB)<<20); err != nil {
			return nil, err
		}
	}
	s.add("machine", 1)
	return &fakeMachine{s: s, id: spec.ID, done: make(chan struct{})}, nil
}

type fakeMachine struct {
	vmm.Machine
	s      *stage
	id     string
	once   sync.Once
	failed error // of Close
	done   chan struct{}
}

func (m *fakeMachine) ID() string                          { return m.id }
func (m *fakeMachine) Resume(ctx context.Context) error    { return m.s.do(ctx, "resume") }
func (m *fakeMachine) Pause(ctx context.Context) error     { return m.s.do(ctx, "pause") }
func (m *fakeMachine) Disconnect() error                   { return m.s.do(context.Background(), "disconnect") }
func (m *fakeMachine) Done() <-chan struct{}               { return m.done }
func (m *fakeMachine) Err() error                          { return nil }
func (m *fakeMachine) Listen(uint32) (net.Listener, error) { return nil, errors.New("not played") }

func (m *fakeMachine) Snapshot(ctx context.Context, dir string) error {
	if err := m.s.do(ctx, "snapshot"); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "state"), []byte("device state"), 0o600)
}

func (m *fakeMachine) Close() error {
	m.once.Do(func() {
		m.failed = m.s.do(context.Background(), "close machine")
		m.s.add("machine", -1)
		close(m.done)
	})
	return m.failed
}

// The agent.

func (s *stage) agent() Agent {
	return Agent{
		Probe: func(ctx context.Context, _ vmm.Machine) error { return s.do(ctx, "probe") },
		Warm:  func(ctx context.Context, _ vmm.Machine) error { return s.do(ctx, "warm") },
	}
}

// dataDir is a directory that machines' users could pass through; testing's own are closed to them.
func dataDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "provision-*")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o711); err != nil {
		t.Fatal(err)
	}
	return dir
}

func config(dir string) Config {
	return Config{
		DataDir: dir, MemoryMiB: 64, VCPUs: 1, Rest: RestAuto, TemplateTimeout: time.Minute,
		Jail: jail.Config{Cgroup: "ephemeral-provision-test", FirstUID: 20000, UIDs: 10},
	}
}

func image(t testing.TB, dir string) images.Image {
	t.Helper()
	i := images.Image{Name: "base", Digest: "sha256:1234"}
	for name, path := range map[string]*string{"kernel": &i.Kernel, "initramfs": &i.Initramfs, "rootfs": &i.RootFS} {
		*path = filepath.Join(dir, name)
		if err := os.WriteFile(*path, []byte(name), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return i
}

// open is a provisioner on the stage.
func open(t testing.TB, s *stage, c Config) *Provisioner {
	t.Helper()
	p, err := prepare(c, s, s.agent())
	if err != nil {
		t.Fatal(err)
	}
	p.host = s
	return p
}

// made is a provisioner with a template of the stage's driver, and an empty log.
func made(t testing.TB, s *stage) (*Provisioner, vmm.Template) {
	t.Helper()
	dir := dataDir(t)
	p := open(t, s, config(dir))
	tmpl, err := p.Template(context.Background(), image(t, dir), p.config.Shape(), nil)
	if err != nil {
		t.Fatal(err)
	}
	s.log = nil
	return p, tmpl
}
