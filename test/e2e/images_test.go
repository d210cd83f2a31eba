package e2e

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/ephemeral-run/ephemeral/client"
	"github.com/ephemeral-run/ephemeral/run"
)

// One node serves two images, the second with machines of another size; each run gets a machine of its image, the pools share
// the node's limits, and what is not served or not allowed is refused.
func TestTwoImagesOnOneNode(t *testing.T) {
	base, err := filepath.Abs("../../build/images/base")
	if err != nil {
		t.Fatal(err)
	}
	if dir := os.Getenv("EPHEMERAL_TEST_IMAGE"); dir != "" {
		base = dir
	}
	if base, err = filepath.EvalSymlinks(base); err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(binaries.dir, "two")
	imageDir := filepath.Join(dir, "images")
	if err := os.MkdirAll(imageDir, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"base", "data"} {
		if err := os.Symlink(base, filepath.Join(imageDir, name)); err != nil {
			t.Fatal(err)
		}
	}
	s, err := start(filepath.Join(dir, "data"), "EPHEMERAL_IMAGE_DIR="+imageDir, "EPHEMERAL_IMAGES=base,data:320", "EPHEMERAL_POOL_MIN_READY=1",
		"EPHEMERAL_POOL_MAX_READY=1", "EPHEMERAL_POOL_MAX_MACHINES=2")
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := s.stop(); err != nil {
			t.Error(err)
		}
		if left, err := s.residue(); err != nil || left.Total() > 0 {
			t.Errorf("left behind: %+v, %v", left, err)
		}
	}()
	m := s.tenant(t, 1_000_000)
	ctx, cancel := context.WithTimeout(t.Context(), startLimit)
	defer cancel()
	memory := func(image string) int {
		t.Helper()
		r := m.finish(t, client.Request{Command: `sed -n 's/^MemTotal: *\([0-9]*\).*/\1/p' /proc/meminfo`, Image: image})
		if r.State != run.Succeeded {
			t.Fatalf("%s: %s, %+v", image, r.State, r.Error)
		}
		kib, err := strconv.Atoi(strings.TrimSpace(r.Result.Stdout.Content))
		if err != nil {
			t.Fatalf("%s: %v", image, err)
		}
		return kib >> 10
	}
	if mib := memory(""); mib <= 320 || mib > 512 {
		t.Errorf("a machine of base sees %d MiB, want more than 320 and at most 512", mib)
	}
	if mib := memory("data"); mib <= 160 || mib > 320 {
		t.Errorf("a machine of data sees %d MiB, want at most 320", mib)
	}
	var p *client.Problem
	if _, err := m.CreateRun(ctx, client.Request{Command: "true", Image: "nope"}, client.CreateOptions{}); !errors.As(err, &p) ||
		p.Code != "unknown_image" || !strings.Contains(p.Errors[0].Detail, "base, data") {
		t.Errorf("an image that is not served: %v", err)
	}
	out, _, err := s.cli(ctx, nil, "pool", "show")
	if err != nil || !strings.Contains(out, "base-1x512") || !strings.Contains(out, "data-1x320") {
		t.Errorf("pool show: %v\n%s", err, out)
	}
	if out, errs, err := s.cli(ctx, nil, "orgs", "images", m.org, "base"); err != nil || !strings.Contains(out, "may use base\n") {
		t.Fatalf("orgs images: %v\n%s%s", err, out, errs)
	}
	if _, err := m.CreateRun(ctx, client.Request{Command: "true", Image: "data"}, client.CreateOptions{}); !errors.As(err, &p) || p.Code != "image_not_allowed" {
		t.Errorf("an image that is not allowed: %v", err)
	}
}
