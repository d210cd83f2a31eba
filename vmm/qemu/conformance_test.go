package qemu_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/ephemeral-run/ephemeral/images"
	"github.com/ephemeral-run/ephemeral/vmm/qemu"
	"github.com/ephemeral-run/ephemeral/vmm/vmmtest"
)

// config is the default one, with the program that the environment names.
func config() qemu.Config {
	c := qemu.Config{Path: os.Getenv("EPHEMERAL_QEMU"), Accel: "auto", TBSize: 64, VMGenID: true}
	if c.Path == "" {
		c.Path = "qemu-system-x86_64"
	}
	return c
}

// image is the one that the environment names, or that `make image` builds.
func image(t testing.TB) images.Image {
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
	vmmtest.Run(t, vmmtest.Harness{Driver: driver(t, config()), Image: image(t)})
}
