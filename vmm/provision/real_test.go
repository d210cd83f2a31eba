package provision_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ephemeral-run/ephemeral/images"
	"github.com/ephemeral-run/ephemeral/vmm"
	"github.com/ephemeral-run/ephemeral/vmm/cloudhypervisor/chfake"
	"github.com/ephemeral-run/ephemeral/vmm/jail"
	"github.com/ephemeral-run/ephemeral/vmm/provision"
	"github.com/ephemeral-run/ephemeral/vmm/qemu"
	"github.com/ephemeral-run/ephemeral/vmm/vmmtest"
)

// holdVariable makes this program, started anew by a test, create machines in that data directory and hold them.
const holdVariable = "EPHEMERAL_TEST_HOLD"

func TestMain(m *testing.M) {
	chfake.Main()
	if dir := os.Getenv(holdVariable); dir != "" {
		if err := hold(dir); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	code := m.Run()
	if kept != "" {
		if err := os.RemoveAll(kept); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = max(code, 1)
		}
	}
	os.Exit(code)
}

// kept is a data directory for tests that take turns with it, so that its template is made once. "": there is none yet.
var kept string

// lasting is the directory kept.
func lasting(t testing.TB) string {
	t.Helper()
	if kept != "" {
		return kept
	}
	dir, err := os.MkdirTemp("", "provision-*")
	if err != nil {
		t.Fatal(err)
	}
	kept = dir
	if err := os.Chmod(dir, 0o711); err != nil { // machines' users pass through
		t.Fatal(err)
	}
	return dir
}

// Machines on the real host: network namespace, jail, QEMU, Debian.

func realConfig(dir string) provision.Config {
	return provision.Config{
		DataDir: dir, MemoryMiB: 512, VCPUs: 1, Rest: provision.RestPaused, TemplateTimeout: 3 * time.Minute,
		Jail: jail.Config{
			Bubblewrap: "bwrap", RunDir: "/run/ephemeral", Cgroup: "ephemeral-provision-test", FirstUID: 20000, UIDs: 10000,
			OverheadMiB: 256, Pids: 128, CPUWeight: 50, OpenFiles: 1024, OOMScoreAdj: 500,
		},
	}
}

func realImage() (images.Image, error) {
	dir := os.Getenv("EPHEMERAL_TEST_IMAGE")
	if dir == "" {
		dir = filepath.Join("..", "..", "build", "images", "base")
	}
	img, err := images.Open(dir)
	if err != nil {
		return img, fmt.Errorf("%w: run make image", err)
	}
	return img, nil
}

func realAgent() provision.Agent {
	run := func(ctx context.Context, m vmm.Machine, commands ...string) error {
		for _, c := range commands {
			if err := vmmtest.NewAgent(m.Dial).Run(ctx, nil, io.Discard, strings.Fields(c)...); err != nil {
				return err
			}
		}
		return nil
	}
	return provision.Agent{
		Probe: func(ctx context.Context, m vmm.Machine) error { return run(ctx, m, "/bin/true") },
		Warm: func(ctx context.Context, m vmm.Machine) error {
			return run(ctx, m, "sh -c true", "python3 -c pass", "curl --version")
		},
	}
}

func realDriver() (*qemu.Driver, error) {
	path := os.Getenv("EPHEMERAL_QEMU")
	if path == "" {
		path = "qemu-system-x86_64"
	}
	return qemu.New(qemu.Config{Path: path, Accel: "auto", TBSize: 64, VMGenID: true})
}

// openReal opens a provisioner in dir, as a node does at its start, and its template.
func openReal(ctx context.Context, dir string, progress func(string)) (*provision.Provisioner, vmm.Template, provision.Residue, func() error, error) {
	var none vmm.Template
	img, err := realImage()
	if err != nil {
		return nil, none, provision.Residue{}, nil, err
	}
	driver, err := realDriver()
	if err != nil {
		return nil, none, provision.Residue{}, nil, err
	}
	p, err := provision.New(ctx, realConfig(dir), driver, realAgent())
	if err != nil {
		return nil, none, provision.Residue{}, nil, errors.Join(err, driver.Close())
	}
	end := func() error { return errors.Join(p.Close(), driver.Close()) }
	found, err := p.Reconcile(ctx)
	if err != nil {
		return nil, none, found, nil, errors.Join(err, end())
	}
	t, err := p.Template(ctx, img, realConfig(dir).Shape(), progress)
	if err != nil {
		return nil, none, found, nil, errors.Join(err, end())
	}
	return p, t, found, end, nil
}

func TestRealMachines(t *testing.T) {
	dir := reachable(t)
	before, files := runtime.NumGoroutine(), descriptors(t)
	ctx, cancel := context.WithTimeout(t.Context(), 8*time.Minute)
	defer cancel()
	p, tmpl, found, end, err := openReal(ctx, dir, func(s string) { t.Log(s) })
	if err != nil {
		t.Fatal(err)
	}
	if found.Total() != 0 {
		t.Errorf("a fresh data directory had %+v", found)
	}
	r := &real{t: t, p: p, template: tmpl, dir: dir}
	t.Run("template is reused", r.reuse)
	t.Run("twenty in a row", r.row)
	t.Run("six at once", r.atOnce)
	t.Run("rests paused", r.rests)
	t.Run("sees only its own", r.view)
	t.Run("counts egress", r.egress)
	t.Run("creation cut short", r.cut)
	t.Run("VMM killed", r.killed)
	if err := end(); err != nil {
		t.Errorf("close: %v", err)
	}
	nothingLeft(t, dir)
	eventually(t, func() error {
		if now := runtime.NumGoroutine(); now > before {
			buf := make([]byte, 1<<16)
			return fmt.Errorf("%d goroutines where %d were:\n%s", now, before, buf[:runtime.Stack(buf, true)])
		}
		if now := descriptors(t); now > files {
			return fmt.Errorf("%d descriptors where %d were", now, files)
		}
		return nil
	})
	t.Run("node killed", func(t *testing.T) { nodeKilled(t, dir) })
}

type real struct {
	t        *testing.T
	p        *provision.Provisioner
	template vmm.Template
	dir      string
}

func (r *real) create(t *testing.T) *provision.Machine {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	m, err := r.p.Create(ctx, r.template)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	})
	return m
}

// ask runs a command in a machine, as root.
func ask(t *testing.T, m *provision.Machine, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	if err := m.Wake(ctx); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if err := vmmtest.NewAgent(m.Dial).Run(ctx, nil, &out, args...); err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(out.String())
}

func (r *real) clean(t *testing.T) {
	t.Helper()
	residue, err := r.p.Residue()
	if err != nil || residue.Total() != 0 {
		t.Errorf("left: %+v, %v", residue, err)
	}
}

func (r *real) reuse(t *testing.T) {
	again, err := r.p.Template(t.Context(), r.template.Image, r.template.Shape, func(s string) { t.Errorf("it does not just reuse: %s", s) })
	if err != nil || again != r.template {
		t.Errorf("got %+v, %v", again, err)
	}
}

func (r *real) row(t *testing.T) {
	files, goroutines := descriptors(t), runtime.NumGoroutine()
	var times [][]time.Duration
	var closing []time.Duration
	for i := range 20 {
		m := r.create(t)
		if i == 0 {
			if got := ask(t, m, "echo", "here"); got != "here" {
				t.Errorf("the machine answers %q", got)
			}
		}
		var row []time.Duration
		for _, s := range m.Steps() {
			row = append(row, s.Duration)
		}
		times = append(times, row)
		start := time.Now()
		if err := m.Close(); err != nil {
			t.Fatal(err)
		}
		closing = append(closing, time.Since(start))
		r.clean(t)
	}
	var report []string
	sum := time.Duration(0)
	for i, name := range []string{provision.StepLaunch, provision.StepLoad, provision.StepResume, provision.StepProbe, provision.StepRest} {
		var column []time.Duration
		for _, row := range times {
			column = append(column, row[i])
		}
		m := median(column)
		sum += m
		report = append(report, fmt.Sprintf("%s %.1f", name, m.Seconds()*1000))
	}
	t.Logf("medians in ms: %s; sum %.1f; close %.1f", strings.Join(report, ", "), sum.Seconds()*1000, median(closing).Seconds()*1000)
	eventually(t, func() error {
		if f, g := descriptors(t), runtime.NumGoroutine(); f > files+2 || g > goroutines { // a sealed copy of the memory may stay
			return fmt.Errorf("%d descriptors and %d goroutines where %d and %d were", f, g, files, goroutines)
		}
		return nil
	})
}

func median(d []time.Duration) time.Duration {
	slices.Sort(d)
	return d[len(d)/2]
}

func (r *real) atOnce(t *testing.T) {
	const n = 6
	machines := make([]*provision.Machine, n)
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			m, err := r.p.Create(ctx, r.template)
			if err != nil {
				t.Error(err)
				return
			}
			machines[i] = m
		})
	}
	wg.Wait()
	for _, m := range machines {
		if m == nil {
			continue
		}
		if got := ask(t, m, "echo", m.ID()); got != m.ID() {
			t.Errorf("machine %s answers %q", m.ID(), got)
		}
		wg.Go(func() {
			if err := m.Close(); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	r.clean(t)
}

func (r *real) rests(t *testing.T) {
	m := r.create(t)
	first, err := m.Stats()
	if err != nil {
		t.Fatal(err)
	}
	time.Sleep(500 * time.Millisecond)
	second, err := m.Stats()
	if err != nil {
		t.Fatal(err)
	}
	if used := second.CPU - first.CPU; used > 20*time.Millisecond {
		t.Errorf("a paused machine used %s of CPU in 500 ms", used)
	}
}

func nothingLeft(t *testing.T, dir string) {
	t.Helper()
	left, err := provision.Survey(realConfig(dir))
	if err != nil || left.Total() != 0 {
		t.Errorf("left: %+v, %v", left, err)
	}
}

// reachable is a directory that machines' users can pass through.
func reachable(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "provision-*")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	if err := os.Chmod(dir, 0o711); err != nil {
		t.Fatal(err)
	}
	return dir
}

func descriptors(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

func eventually(t *testing.T, check func() error) {
	t.Helper()
	var err error
	for range 200 {
		if err = check(); err == nil {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Error(err)
}
