package qemu_test

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/ephemeral-run/ephemeral/vmm"
	"github.com/ephemeral-run/ephemeral/vmm/qemu"
	"github.com/ephemeral-run/ephemeral/vmm/vmmtest"
)

// config is the default one, with program and accelerator that the environment names.
func config() qemu.Config {
	c := qemu.Config{Path: os.Getenv("EPHEMERAL_QEMU"), Accel: os.Getenv("EPHEMERAL_QEMU_ACCEL"), TBSize: 64, VMGenID: true}
	if c.Path == "" {
		c.Path = "qemu-system-x86_64"
	}
	if c.Accel == "" {
		c.Accel = "auto"
	}
	return c
}

func driver(t testing.TB, c qemu.Config) *qemu.Driver {
	t.Helper()
	d, err := qemu.New(c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return d
}

func TestConformance(t *testing.T) {
	vmmtest.Run(t, vmmtest.Harness{Driver: driver(t, config()), Image: vmmtest.Image(t), Slow: slow(t)})
}

// slow is what the environment says of this host: KVM may itself be inside an emulated machine. 0: nothing.
func slow(t testing.TB) float64 {
	t.Helper()
	value := os.Getenv("EPHEMERAL_TEST_SLOW")
	if value == "" {
		return 0
	}
	factor, err := strconv.ParseFloat(value, 64)
	if err != nil || factor < 1 {
		t.Fatalf("EPHEMERAL_TEST_SLOW is %q, not a number from 1 on", value)
	}
	return factor
}

// TestOptionsOfTemplates makes a template without VM generation ID and with a console, as an operator may choose.
func TestOptionsOfTemplates(t *testing.T) {
	c := config()
	c.VMGenID, c.Console = false, true
	d := driver(t, c)
	dir := t.TempDir()
	h := vmmtest.Harness{Driver: d, Image: vmmtest.Image(t), Slow: slow(t)}
	tpl := h.MakeTemplate(t, dir)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if _, err := h.TimeClone(ctx, t, tpl); err != nil {
		t.Error(err)
	}
	h.Driver = driver(t, config())
	if _, err := h.TimeClone(ctx, t, tpl); !errors.Is(err, vmm.ErrTemplate) {
		t.Errorf("a driver with other options: %v", err)
	}
}

func TestConsole(t *testing.T) {
	c := config()
	c.Console = true
	dir := t.TempDir()
	m, err := driver(t, c).Boot(t.Context(), vmm.Spec{
		ID: "console", Dir: dir, Image: vmmtest.Image(t), Shape: vmm.Shape{VCPUs: 1, MemoryMiB: 256}, Launcher: &vmmtest.Launcher{},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = m.Close() }()
	deadline := time.Now().Add(time.Minute)
	for {
		log, err := os.ReadFile(filepath.Join(dir, "console.log"))
		if err != nil {
			t.Fatal(err)
		}
		if bytes.Contains(log, []byte("Linux version")) {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("the console says %q", log)
		}
		time.Sleep(50 * time.Millisecond)
	}
}
