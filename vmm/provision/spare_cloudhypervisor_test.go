package provision

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/ephemeral-run/ephemeral/images"
	"github.com/ephemeral-run/ephemeral/vmm"
	"github.com/ephemeral-run/ephemeral/vmm/cloudhypervisor"
	"github.com/ephemeral-run/ephemeral/vmm/cloudhypervisor/chfake"
	"github.com/ephemeral-run/ephemeral/vmm/network"
	"github.com/ephemeral-run/ephemeral/vmm/vmmtest"
)

// plainHost has neither jails nor taps: it starts processes as they are.
type plainHost struct{ *vmmtest.Launcher }

func (h plainHost) cell(string, int) (cell, error)                 { return h, nil }
func (plainHost) tap(string, int) (tap, error)                     { return noTap{}, nil }
func (plainHost) removeStale(context.Context) (r Residue, _ error) { return r, nil }
func (plainHost) close() error                                     { return nil }
func (plainHost) UID() int                                         { return os.Getuid() }
func (plainHost) SetUrgent(bool) error                             { return nil }
func (plainHost) Close() error                                     { return nil }

// noTap is no card at all.
type noTap struct{}

func (noTap) nic() *vmm.NIC                   { return nil }
func (noTap) Counters() (p, b int64, _ error) { return 0, 0, nil }
func (noTap) Attempts() (a network.Attempts)  { return a }
func (noTap) Close() error                    { return nil }

// fakeCloudHypervisor is a provisioner with a spare in hand, on the real driver with a fake VMM, and its template.
func fakeCloudHypervisor(t *testing.T, o chfake.Options) (*Provisioner, vmm.Template, plainHost) {
	t.Helper()
	d, err := cloudhypervisor.New(cloudhypervisor.Config{Path: chfake.Install(t, o)}, cloudhypervisor.WithoutKVM())
	if err != nil {
		t.Fatal(err)
	}
	run := func(ctx context.Context, m vmm.Machine) error {
		return vmmtest.NewAgent(m.Dial).Run(ctx, nil, io.Discard, "true")
	}
	dir := dataDir(t)
	c := config(dir)
	c.Spares = 1
	p, err := prepare(c, d, Agent{Probe: run, Warm: run})
	if err != nil {
		t.Fatal(err)
	}
	h := plainHost{new(vmmtest.Launcher)}
	p.host = h
	img := images.Image{Name: "fake", Digest: "sha256:0", Kernel: filepath.Join(dir, "kernel"), Initramfs: filepath.Join(dir, "initramfs"), RootFS: filepath.Join(dir, "root")}
	for _, path := range []string{img.Kernel, img.Initramfs, img.RootFS} {
		if err := os.WriteFile(path, []byte("fake"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	tmpl, err := p.Template(t.Context(), img, c.Shape(), func(line string) { t.Log(line) })
	if err != nil {
		t.Fatal(err)
	}
	m, err := p.Create(t.Context(), tmpl)
	if err != nil {
		t.Fatal(err)
	}
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
	await(t, p, tmpl, 1)
	return p, tmpl, h
}

// gone closes the provisioner, of which no process may be left.
func gone(t *testing.T, p *Provisioner, h plainHost) {
	t.Helper()
	if err := p.Close(); err != nil {
		t.Error(err)
	}
	for deadline := time.Now().Add(5 * time.Second); len(h.Pids()) > 0 && time.Now().Before(deadline); {
		time.Sleep(5 * time.Millisecond)
	}
	if pids := h.Pids(); len(pids) > 0 {
		t.Errorf("processes %v are left", pids)
	}
	if left, err := os.ReadDir(filepath.Join(p.config.DataDir, "machines")); err != nil || len(left) > 0 {
		t.Errorf("in machines/: %v, %v", left, err)
	}
}

// One after the other, each machine is the process that waited as a spare, and the next spare is another one.
func TestCloudHypervisorStartsAtTheLoadWithASpare(t *testing.T) {
	p, tmpl, h := fakeCloudHypervisor(t, chfake.Options{})
	for range 3 {
		waiting := h.Pids()
		if len(waiting) != 1 {
			t.Fatalf("processes %v beside the spare", waiting)
		}
		m, err := p.Create(t.Context(), tmpl)
		if err != nil {
			t.Fatal(err)
		}
		if s, err := m.Stats(); err != nil || s.Pid != waiting[0] {
			t.Errorf("the machine is process %d, the spare was %d (%v)", s.Pid, waiting[0], err)
		}
		if err := errors.Join(m.Wake(t.Context()), vmmtest.NewAgent(m.Dial).Ping(t.Context()), m.Close()); err != nil {
			t.Error(err)
		}
		await(t, p, tmpl, 1)
	}
	gone(t, p, h)
}

// A spare whose process has died is not made a machine of, and one that cannot load leaves nothing.
func TestCloudHypervisorSparesThatAreOfNoUse(t *testing.T) {
	p, tmpl, h := fakeCloudHypervisor(t, chfake.Options{})
	p.spares.mu.Lock()
	spare := p.spares.byKey[tmpl.Key][0]
	p.spares.mu.Unlock()
	if err := spare.empty.Close(); err != nil {
		t.Fatal(err)
	}
	m, err := p.Create(t.Context(), tmpl)
	if err != nil {
		t.Fatal(err)
	}
	if err := m.Close(); err != nil {
		t.Error(err)
	}
	gone(t, p, h)

	p, tmpl, h = fakeCloudHypervisor(t, chfake.Options{})
	broken, cancel := context.WithCancel(t.Context())
	cancel()
	if m, err := p.Create(broken, tmpl); err == nil {
		t.Error("a machine was made after its caller had left", m.Close())
	}
	gone(t, p, h)
}
