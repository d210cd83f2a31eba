package e2e

import (
	"context"
	"errors"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/ephemeral-run/ephemeral/client"
	"github.com/ephemeral-run/ephemeral/run"
)

// One node serves two images, made of container images, one with machines of another size; each run gets a machine of its image,
// the pools share the node's limits, and what is not served or not allowed is refused.
func TestImagesOnOneNode(t *testing.T) {
	dir := filepath.Join(binaries.dir, "several")
	imageDir := filepath.Join(dir, "images")
	agent := imageStore(t, imageDir)
	saved, oci := containers(t, filepath.Join(imageDir, "base"))
	for name, from := range map[string]string{"data": saved, "layout": oci} {
		out, err := ephemeral(t.Context(), []string{"EPHEMERAL_IMAGE_DIR=" + imageDir}, "image", "build", name, "--oci", from, "--agent", agent)
		if err != nil || !strings.Contains(out, "image "+name+": sha256:") {
			t.Fatalf("%v\n%s", err, out)
		}
	}
	s, err := start(filepath.Join(dir, "data"), "EPHEMERAL_IMAGE_DIR="+imageDir, "EPHEMERAL_IMAGES=data:320,layout", "EPHEMERAL_POOL_MIN_READY=1",
		"EPHEMERAL_POOL_MAX_READY=1", "EPHEMERAL_POOL_MAX_MACHINES=2")
	if err != nil {
		t.Fatal(err)
	}
	stopped := false
	stop := func() {
		if stopped {
			return
		}
		stopped = true
		if err := s.stop(); err != nil {
			t.Error(err)
		}
		if left, err := s.residue(); err != nil || left.Total() > 0 {
			t.Errorf("left behind: %+v, %v", left, err)
		}
	}
	defer stop()
	ctx, cancel := context.WithTimeout(t.Context(), startLimit)
	defer cancel()
	m := s.tenant(t, 1_000_000)
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
	if mib := memory("layout"); mib <= 320 || mib > 512 {
		t.Errorf("a machine of layout sees %d MiB, want more than 320 and at most 512", mib)
	}
	if mib := memory("data"); mib <= 160 || mib > 320 {
		t.Errorf("a machine of data sees %d MiB, want at most 320", mib)
	}
	hello := func(image, want string) {
		t.Helper()
		r := m.finish(t, client.Request{Command: "/opt/hello; id -un; ls /etc/gone /usr/bin/python3", Image: image})
		if r.Result == nil || r.Result.Stdout.Content != want {
			t.Errorf("%s: %s, %+v, %+v, want %q", image, r.State, r.Error, r.Result, want)
		}
	}
	hello("data", "hello from a container\nworker\n/etc/gone\n")
	hello("layout", "hello from a layout\nworker\n")
	walls(t, m, "layout")
	walls(t, m, "data")
	var p *client.Problem
	if _, err := m.CreateRun(ctx, client.Request{Command: "true", Image: "nope"}, client.CreateOptions{}); !errors.As(err, &p) ||
		p.Code != "unknown_image" || !strings.Contains(p.Errors[0].Detail, "data, layout") {
		t.Errorf("an image that is not served: %v", err)
	}
	out, _, err := s.cli(ctx, nil, "pool", "show")
	if err != nil || !strings.Contains(out, "layout-1x512") || !strings.Contains(out, "data-1x320") {
		t.Errorf("pool show: %v\n%s", err, out)
	}
	if out, errs, err := s.cli(ctx, nil, "orgs", "images", m.org, "layout"); err != nil || !strings.Contains(out, "may use layout\n") {
		t.Fatalf("orgs images: %v\n%s%s", err, out, errs)
	}
	if _, err := m.CreateRun(ctx, client.Request{Command: "true", Image: "data"}, client.CreateOptions{}); !errors.As(err, &p) || p.Code != "image_not_allowed" {
		t.Errorf("an image that is not allowed: %v", err)
	}
	// What the node serves stays, whoever asks; what nothing uses goes.
	if out, errs, err := s.cli(ctx, nil, "image", "remove", "data"); err == nil || !strings.Contains(errs, "a node serves data") || !strings.Contains(errs, "EPHEMERAL_IMAGES") {
		t.Errorf("an image that is served: %v\n%s%s", err, out, errs)
	}
	collect(t, s, []string{"base"}, 0)
	hello("layout", "hello from a layout\nworker\n")
	stop()
	if out, errs, err := s.cli(ctx, nil, "image", "remove", "data"); err != nil || !strings.Contains(out, "image data is removed: 1 builds") {
		t.Errorf("%v\n%s%s", err, out, errs)
	}
	collect(t, s, nil, 2)
	if out, errs, err := s.cli(ctx, nil, "image", "verify", "layout"); err != nil {
		t.Errorf("%v\n%s%s", err, out, errs)
	}
}

// collect removes all that nothing uses, and compares: images, and the number of templates.
func collect(t *testing.T, s *server, images []string, templates int) {
	t.Helper()
	var got struct {
		Images    struct{ Images []string }
		Templates struct{ Templates []string }
	}
	s.json(t, &got, "image", "gc", "--all")
	if !slices.Equal(got.Images.Images, images) || len(got.Templates.Templates) != templates {
		t.Errorf("removed %+v, want images %v and %d templates", got, images, templates)
	}
}
