package qemu

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/ephemeral-run/ephemeral/images"
	"github.com/ephemeral-run/ephemeral/vmm"
	"github.com/ephemeral-run/ephemeral/vmm/vmmtest"
)

func TestSmoke(t *testing.T) {
	d, err := New(Config{Path: "qemu-system-x86_64", Accel: "auto", TBSize: 64, VMGenID: true})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	t.Log(d.Version(), d.CPUModel(), d.data)
	dir := t.TempDir()
	k := filepath.Join(dir, "k")
	os.WriteFile(k, make([]byte, 1<<20), 0o644)
	img := images.Image{Kernel: os.Getenv("K"), Initramfs: k, RootFS: k}
	s := vmm.Spec{ID: "abc", Dir: dir, Image: img, Shape: vmm.Shape{VCPUs: 1, MemoryMiB: 256}, RAM: filepath.Join(dir, "ram"), Launcher: &vmmtest.Launcher{}}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	t0 := time.Now()
	lap := func(n string) { t.Logf("%s %v", n, time.Since(t0)); t0 = time.Now() }
	m, err := d.Boot(ctx, s)
	if err != nil {
		t.Fatal(err)
	}
	lap("boot")
	dctx, c2 := context.WithTimeout(ctx, 200*time.Millisecond)
	_, err = m.Dial(dctx, 1024)
	c2()
	t.Log(err)
	lap("dial")
	if err := m.Disconnect(); err != nil {
		t.Fatal(err)
	}
	lap("disc")
	dctx, c2 = context.WithTimeout(ctx, 200*time.Millisecond)
	_, err = m.Dial(dctx, 1024)
	c2()
	t.Log(err)
	if err := m.Disconnect(); err != nil {
		t.Fatal(err)
	}
	lap("disc")
	if err := m.Pause(ctx); err != nil {
		t.Fatal(err)
	}
	lap("pause")
	tp := filepath.Join(dir, "t")
	os.Mkdir(tp, 0o755)
	if err := m.Snapshot(ctx, tp); err != nil {
		t.Fatal(err)
	}
	lap("snap")
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
	lap("close")
	for range 4 {
		r, err := d.Restore(ctx, vmm.Template{Dir: tp, RAM: s.RAM, Image: img, Shape: s.Shape}, vmm.Spec{ID: "def", Dir: dir, Launcher: s.Launcher})
		if err != nil {
			t.Fatal(err)
		}
		lap("restore")
		t.Log(r.Stats())
		t0 = time.Now()
		if err := r.Resume(ctx); err != nil {
			t.Fatal(err)
		}
		lap("resume")
		if err := r.Close(); err != nil {
			t.Fatal(err)
		}
		lap("close")
	}
}
