package cloudhypervisor

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/ephemeral-run/ephemeral/images"
	"github.com/ephemeral-run/ephemeral/vmm"
	"github.com/ephemeral-run/ephemeral/vmm/cloudhypervisor/chfake"
	"github.com/ephemeral-run/ephemeral/vmm/hypervisor"
	"github.com/ephemeral-run/ephemeral/vmm/vmmtest"
)

// step is a call and its answer. The steps of the table are made one after another: what they do to the state is part of it.
type step struct {
	state  string // in which the call is made
	method string
	call   string
	body   any
	status int
	says   string // the root cause
	boots  bool   // it needs KVM, and so do all that follow
}

const (
	get = http.MethodGet
	put = http.MethodPut
)

// table is what version 53 answers. dir is the machine's, config that of a machine with its memory in a file, clone the
// directory of a clone's.
func table(dir string, config, clone any) []step {
	to := func(name string) any {
		return map[string]string{"destination_url": "file://" + filepath.Join(dir, name)}
	}
	from := func(name string) any { return map[string]string{"source_url": "file://" + filepath.Join(dir, name)} }
	const running, notRunning, already = "Trying to snapshot while VM is running", "VM is not running", "VM is already created"
	return []step{
		{"none", get, "vmm.ping", nil, 200, "", false},
		{"none", get, "vm.info", nil, 404, "VM is not created", false},
		{"none", put, "vm.boot", nil, 404, "VM config is missing", false},
		{"none", put, "vm.pause", nil, 500, notRunning, false},
		{"none", put, "vm.resume", nil, 500, notRunning, false},
		{"none", get, "vm.counters", nil, 500, notRunning, false},
		{"none", put, "vm.shutdown", nil, 500, notRunning, false},
		{"none", put, "vm.power-button", nil, 500, notRunning, false},
		{"none", put, "vm.snapshot", to("snapshot"), 500, notRunning, false},
		{"none", put, "vm.restore", from("missing"), 500, "Destination is not a directory", false},
		{"none", put, "vm.delete", nil, 204, "", false},
		{"none", put, "vm.nothing", nil, 404, "Not Found", false},
		{"none", get, "vm.create", nil, 400, "Bad Request", false},
		{"none", put, "vm.boot", map[string]int{}, 400, "Bad Request", false},
		{"none", put, "vm.create", nil, 400, "", false},
		{"none", put, "vm.create", map[string]any{"cpus": 7, "payload": map[string]any{}}, 400, "Failed to deserialize JSON", false},
		{"none", put, "vm.create", config, 204, "", false},
		{"created", put, "vm.create", config, 500, already, false},
		{"created", get, "vm.info", nil, 200, "", false},
		{"created", put, "vm.pause", nil, 500, notRunning, false},
		{"created", put, "vm.resume", nil, 500, notRunning, false},
		{"created", get, "vm.counters", nil, 500, notRunning, false},
		{"created", put, "vm.shutdown", nil, 500, notRunning, false},
		{"created", put, "vm.snapshot", to("snapshot"), 500, notRunning, false},
		{"created", put, "vm.restore", from("clone"), 500, already, false},
		{"created", put, "vm.delete", nil, 204, "", false},
		{"none", put, "vm.create", config, 204, "", false},
		{"created", put, "vm.boot", nil, 204, "", true},
		{"running", put, "vm.boot", nil, 500, already, true},
		{"running", put, "vm.create", config, 500, already, true},
		{"running", get, "vm.info", nil, 200, "", true},
		{"running", get, "vm.counters", nil, 200, "", true},
		{"running", put, "vm.resume", nil, 500, "InvalidStateTransition(Running, Running)", true},
		{"running", put, "vm.snapshot", to("snapshot"), 500, running, true},
		{"running", put, "vm.restore", from("clone"), 500, already, true},
		{"running", put, "vm.pause", nil, 204, "", true},
		{"paused", put, "vm.pause", nil, 500, "InvalidStateTransition(Paused, Paused)", true},
		{"paused", put, "vm.boot", nil, 500, already, true},
		{"paused", get, "vm.counters", nil, 200, "", true},
		{"paused", put, "vm.resume", nil, 204, "", true},
		{"running", put, "vm.pause", nil, 204, "", true},
		{"paused", put, "vm.snapshot", to("missing"), 500, "", true},
		{"paused", put, "vm.snapshot", to("snapshot"), 204, "", true},
		{"paused", put, "vm.snapshot", to("snapshot"), 500, "File exists", true},
		{"paused", put, "vm.shutdown", nil, 204, "", true},
		{"shutdown", get, "vm.info", nil, 200, "", true},
		{"shutdown", put, "vm.pause", nil, 500, notRunning, true},
		{"shutdown", put, "vm.shutdown", nil, 500, notRunning, true},
		{"shutdown", put, "vm.delete", nil, 204, "", true},
		{"none", put, "vm.restore", clone, 204, "", true},
		{"restored", put, "vm.pause", nil, 500, "InvalidStateTransition(Paused, Paused)", true},
		{"restored", put, "vm.boot", nil, 500, already, true},
		{"restored", put, "vm.restore", clone, 500, already, true},
		{"restored", put, "vm.resume", nil, 204, "", true},
		{"running", get, "vm.info", nil, 200, "", true},
		{"running", put, "vm.delete", nil, 204, "", true},
		{"none", get, "vm.info", nil, 404, "VM is not created", true},
		{"none", put, "vmm.shutdown", nil, 200, "", false},
	}
}

func TestFakeAnswersAsTheTable(t *testing.T) {
	dir := t.TempDir()
	img := images.Image{Kernel: filepath.Join(dir, "k"), Initramfs: filepath.Join(dir, "i"), RootFS: filepath.Join(dir, "r")}
	for _, path := range []string{img.Kernel, img.Initramfs, img.RootFS} {
		if err := os.WriteFile(path, []byte("fake"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if os.Getenv(chfake.DescriptionVariable) == "" {
		t.Logf("%s names no description: requests are not checked against it", chfake.DescriptionVariable)
	}
	runTable(t, chfake.Install(t, chfake.Options{}), img, true)
}

func TestRealAnswersAsTheTable(t *testing.T) {
	program := os.Getenv("EPHEMERAL_TEST_CLOUD_HYPERVISOR")
	if program == "" {
		t.Skip("EPHEMERAL_TEST_CLOUD_HYPERVISOR names no program")
	}
	if _, err := os.Stat("/dev/kvm"); err != nil {
		t.Skip("it does not start: ", err)
	}
	usable, reason := vmm.KVMUsable()
	if !usable {
		t.Logf("without what needs a machine: %s", reason)
		runTable(t, program, images.Image{Kernel: "/k", Initramfs: "/i", RootFS: "/r"}, false)
		return
	}
	runTable(t, program, vmmtest.Image(t), true)
}

func runTable(t *testing.T, program string, img images.Image, boots bool) {
	dir := t.TempDir()
	p, err := Find(Config{Path: program})
	if err != nil {
		t.Fatal(err)
	}
	d := &Driver{program: p}
	s := vmm.Spec{
		ID: "table", Dir: dir, Image: img, Shape: vmm.Shape{VCPUs: 1, MemoryMiB: 128}, RAM: filepath.Join(dir, "ram"), Launcher: &vmmtest.Launcher{},
	}
	if err := errors.Join(hypervisor.PrepareRAM(s), os.Mkdir(filepath.Join(dir, "snapshot"), 0o700)); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 4*time.Minute)
	defer cancel()
	m, err := d.start(ctx, s, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	}()
	clone := filepath.Join(dir, "clone")
	for i, c := range table(dir, d.bootConfig(s), map[string]string{"source_url": "file://" + clone}) {
		if c.boots && !boots {
			continue
		}
		if c.call == "vm.restore" && c.status == 204 { // made of the snapshot that was just taken
			config, err := os.ReadFile(filepath.Join(dir, "snapshot", configFile))
			if err == nil {
				config, err = cloneConfig(config, s, s.RAM, false)
			}
			if err == nil {
				err = writeClone(clone, config, filepath.Join(dir, "snapshot", stateFile), "")
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		check(ctx, t, m.api, i, c)
	}
	select {
	case <-m.Done():
	case <-time.After(time.Minute):
		t.Error("it goes on after vmm.shutdown")
	}
}

func check(ctx context.Context, t *testing.T, api *client, i int, c step) {
	t.Helper()
	var answer json.RawMessage
	into := any(&answer)
	if c.status == 204 || c.call == "vmm.shutdown" {
		into = nil
	}
	err := api.call(ctx, c.method, c.call, c.body, nil, into)
	var refused *APIError
	switch {
	case c.status < 300:
		if err != nil {
			t.Errorf("%d: %s in state %s: %v", i, c.call, c.state, err)
		}
	case !errors.As(err, &refused):
		t.Errorf("%d: %s in state %s: %v", i, c.call, c.state, err)
	case refused.Status != c.status || !strings.Contains(strings.Join(refused.Causes, "\n"), c.says):
		t.Errorf("%d: %s in state %s: %d %q, want %d %q", i, c.call, c.state, refused.Status, refused.Causes, c.status, c.says)
	}
}
