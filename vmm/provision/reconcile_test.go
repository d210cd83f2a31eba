package provision

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/ephemeral-run/ephemeral/vmm"
)

func diskUse(t *testing.T, path string) (used, size int64) {
	t.Helper()
	info, err := os.Stat(path)
	must(t, err)
	return info.Sys().(*syscall.Stat_t).Blocks * 512, info.Size()
}

func TestReconcileRemovesWhatADeadProcessLeft(t *testing.T) {
	s := newStage()
	p, tmpl := made(t, s)
	dir := p.config.DataDir
	live, err := p.Create(t.Context(), tmpl)
	if err != nil {
		t.Fatal(err)
	}
	for _, left := range []string{"machines/0123456789ab/deep", "machines/ba9876543210", "templates/.build-00-11"} {
		must(t, os.MkdirAll(filepath.Join(dir, left), 0o700))
	}
	must(t, os.WriteFile(filepath.Join(dir, "machines/0123456789ab/deep/file"), nil, 0o400))
	want := Residue{Dirs: 2, Templates: 1}
	if r, err := p.Residue(); r != want || err != nil {
		t.Fatalf("before: %+v, %v", r, err)
	}
	if r, err := p.Reconcile(t.Context()); r != want || err != nil {
		t.Fatalf("removed: %+v, %v", r, err)
	}
	if r, err := p.Residue(); r.Total() != 0 || err != nil {
		t.Fatalf("after: %+v, %v", r, err)
	}
	if r, err := p.Reconcile(t.Context()); r.Total() != 0 || err != nil {
		t.Fatalf("the second time: %+v, %v", r, err)
	}
	if _, err := os.Stat(filepath.Join(dir, "machines", live.ID())); err != nil {
		t.Errorf("a live machine's directory: %v", err)
	}
	if again, err := p.Template(t.Context(), tmpl.Image, tmpl.Shape, nil); err != nil || again.Key != tmpl.Key || s.count("boot") != 0 {
		t.Errorf("the finished template was not kept: %v", err)
	}
	must(t, live.Close())
	s.empty(t, p)
}

func TestReconcileGoesOnAfterErrors(t *testing.T) {
	s := newStage()
	p, _ := made(t, s)
	must(t, os.Mkdir(filepath.Join(p.config.DataDir, "machines/0123456789ab"), 0o700))
	s.fail["remove stale"] = errors.New("netlink is deaf")
	r, err := p.Reconcile(t.Context())
	if r.Dirs != 1 || err == nil || !strings.Contains(err.Error(), "netlink is deaf") {
		t.Fatalf("%+v, %v", r, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := p.Reconcile(ctx); !errors.Is(err, context.Canceled) {
		t.Fatalf("with an ended context: %v", err)
	}
}

func TestNodeIDIsKeptInTheDataDirectory(t *testing.T) {
	dir := dataDir(t)
	c := config(dir)
	first, err := c.NodeID()
	if err != nil || !strings.HasPrefix(first, "node-") || len(first) != len("node-")+8 {
		t.Fatalf("%q, %v", first, err)
	}
	if again, err := c.NodeID(); again != first || err != nil {
		t.Errorf("then %q, %v", again, err)
	}
	if other, err := config(dataDir(t)).NodeID(); other == first || err != nil {
		t.Errorf("another data directory has %q, %v", other, err)
	}
	c.Node = "given"
	if got, err := c.NodeID(); got != "given" || err != nil {
		t.Errorf("given: %q, %v", got, err)
	}
	c.Node = ""
	must(t, os.WriteFile(filepath.Join(dir, "node"), []byte("../x"), 0o644))
	if got, err := c.NodeID(); err == nil {
		t.Errorf("an invalid one was taken: %q", got)
	}
}

func TestDataDirectoryLetsMachinesThroughAndShowsNothing(t *testing.T) {
	dir := filepath.Join(dataDir(t), "data")
	must(t, os.Mkdir(dir, 0o700)) // made by another part of the program before
	s := newStage()
	open(t, s, config(dir))
	for _, path := range []string{dir, dir + "/machines", dir + "/templates"} {
		if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o711 {
			t.Errorf("%s: %v, %v", path, info.Mode(), err)
		}
	}
	closed := filepath.Join(dataDir(t), "closed")
	must(t, os.Mkdir(closed, 0o700))
	c := config(filepath.Join(closed, "data"))
	if _, err := prepare(c, s, s.agent()); err == nil || !strings.Contains(err.Error(), "chmod o+x "+closed) {
		t.Errorf("a data directory that no machine reaches: %v", err)
	}
}

func TestConfigValidate(t *testing.T) {
	for name, change := range map[string]func(*Config){
		"EPHEMERAL_DATA_DIR":           func(c *Config) { c.DataDir = "relative" },
		"EPHEMERAL_NODE":               func(c *Config) { c.Node = "Ä" },
		"EPHEMERAL_MACHINE_MEMORY_MIB": func(c *Config) { c.MemoryMiB = 1 },
		"EPHEMERAL_MACHINE_VCPUS":      func(c *Config) { c.VCPUs = 0 },
		"EPHEMERAL_POOL_REST":          func(c *Config) { c.Rest = "standing" },
		"EPHEMERAL_TEMPLATE_TIMEOUT":   func(c *Config) { c.TemplateTimeout = 0 },
	} {
		c := config("/nowhere")
		change(&c)
		if err := c.Validate(); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
		if _, err := New(t.Context(), c, newStage(), Agent{}); err == nil {
			t.Errorf("%s: was opened", name)
		}
	}
	if err := config("/nowhere").Validate(); err != nil {
		t.Error(err)
	}
	if got := config("/nowhere").Shape(); got != (vmm.Shape{VCPUs: 1, MemoryMiB: 64}) {
		t.Errorf("shape %+v", got)
	}
}
