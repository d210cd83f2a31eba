// Package machine tests what must hold of real machines put together as a node does it: namespace, jail, hypervisor, agent.
// Nothing gets out of them, no two are alike, and no credential is in them.
package machine

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ephemeral-run/ephemeral/images"
	"github.com/ephemeral-run/ephemeral/node/guest"
	"github.com/ephemeral-run/ephemeral/vmm"
	"github.com/ephemeral-run/ephemeral/vmm/jail"
	"github.com/ephemeral-run/ephemeral/vmm/provision"
	"github.com/ephemeral-run/ephemeral/vmm/qemu"
)

// Time limits are wide: machines are emulated on hosts without usable KVM, and the tests of several packages share them.
const (
	templateLimit = 3 * time.Minute
	createLimit   = 2 * time.Minute
	commandLimit  = 2 * time.Minute
)

const memoryMiB = 256

// host is a node's part that makes machines, with one template.
type host struct {
	*provision.Provisioner
	driver   *qemu.Driver
	dir      string
	config   provision.Config
	template vmm.Template
}

// common is the host that most tests share. It is opened by the first that wants it.
var common struct {
	sync.Mutex
	host *host
}

func TestMain(m *testing.M) { os.Exit(testMain(m)) }

func testMain(m *testing.M) int {
	code := m.Run()
	if common.host != nil {
		if err := common.host.close(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return max(code, 1)
		}
	}
	return code
}

func commonHost(t *testing.T) *host {
	t.Helper()
	common.Lock()
	defer common.Unlock()
	if common.host == nil {
		h, err := openHost(t.Context(), true, guest.Probe, nil, templateLimit)
		if err != nil {
			t.Fatal(err)
		}
		common.host = h
	}
	return common.host
}

func testImage() (images.Image, error) {
	dir := os.Getenv("EPHEMERAL_TEST_IMAGE")
	if dir == "" {
		dir = filepath.Join("..", "..", "build", "images", "base")
	}
	dir, err := filepath.Abs(dir)
	if err != nil {
		return images.Image{}, err
	}
	image, err := images.Open(dir)
	if err != nil {
		return image, fmt.Errorf("%w: run make image", err)
	}
	return image, nil
}

func testDriver(vmgenid bool) (*qemu.Driver, error) {
	path := os.Getenv("EPHEMERAL_QEMU")
	if path == "" {
		path = "qemu-system-x86_64"
	}
	return qemu.New(qemu.Config{Path: path, Accel: "auto", TBSize: 64, VMGenID: vmgenid})
}

// booting bounds how many templates boot at the same time: more would only wait for each other, up to their time limits.
var booting = make(chan struct{}, 1)

// hook is what provisioning calls with a machine.
type hook = func(context.Context, vmm.Machine) error

// openHost makes a node of its own in a new directory, and a template within the limit. age, which may be nil, is done to
// the template's machine at last, and may take its time.
func openHost(ctx context.Context, vmgenid bool, probe, age hook, limit time.Duration) (*host, error) {
	image, err := testImage()
	if err != nil {
		return nil, err
	}
	return openHostOf(ctx, image, vmgenid, probe, age, limit)
}

// openHostOf is openHost for an image.
func openHostOf(ctx context.Context, image images.Image, vmgenid bool, probe, age hook, limit time.Duration) (h *host, err error) {
	dir, err := os.MkdirTemp("", "eph-machine-*")
	if err != nil {
		return nil, err
	}
	h = &host{dir: dir, config: provision.Config{
		DataDir: dir, MemoryMiB: memoryMiB, VCPUs: 1, Rest: provision.RestPaused, TemplateTimeout: limit,
		Jail: jail.Config{
			Bubblewrap: "bwrap", RunDir: "/run/ephemeral", Cgroup: "ephemeral-test", FirstUID: 20000, UIDs: 10000,
			OverheadMiB: 256, Pids: 128, CPUWeight: 50, OpenFiles: 1024, OOMScoreAdj: 500,
		},
	}}
	defer func() {
		if err != nil {
			err = errors.Join(err, h.close())
		}
	}()
	if err := os.Chmod(dir, 0o711); err != nil { // machines' users pass through
		return h, err
	}
	if h.driver, err = testDriver(vmgenid); err != nil {
		return h, err
	}
	booting <- struct{}{}
	booted := sync.OnceFunc(func() { <-booting })
	defer booted()
	warm := func(ctx context.Context, m vmm.Machine) error {
		err := guest.Warm(ctx, m)
		if err == nil {
			err = carry(ctx, m)
		}
		booted()
		if err == nil && age != nil {
			err = age(ctx, m)
		}
		return err
	}
	if h.Provisioner, err = provision.New(ctx, h.config, h.driver, provision.Agent{Probe: probe, Warm: warm}); err != nil {
		return h, err
	}
	if _, err := h.Reconcile(ctx); err != nil {
		return h, err
	}
	h.template, err = h.Template(ctx, image, h.config.Shape(), nil)
	return h, err
}

// close gives everything back and says what was left.
func (h *host) close() error {
	var errs []error
	if h.Provisioner != nil {
		errs = append(errs, h.Provisioner.Close())
	}
	if h.driver != nil {
		errs = append(errs, h.driver.Close())
	}
	if h.Provisioner != nil {
		left, err := provision.Survey(h.config)
		if err == nil && left.Total() > 0 {
			err = fmt.Errorf("left on the host: %+v", left)
		}
		errs = append(errs, err)
	}
	return errors.Join(append(errs, os.RemoveAll(h.dir))...)
}

// machine is a running machine.
type machine struct {
	*provision.Machine
	guest    *guest.Client
	identity guest.Identity
	prepared guest.Prepared
}

// clone is a running machine that nobody has prepared.
func (h *host) clone(ctx context.Context) (*machine, error) {
	ctx, cancel := context.WithTimeout(ctx, createLimit)
	defer cancel()
	m, err := h.Create(ctx, h.template)
	if err != nil {
		return nil, err
	}
	if err := m.Wake(ctx); err != nil {
		return nil, errors.Join(err, m.Close())
	}
	return &machine{Machine: m, guest: guest.Connect(m.Dial)}, nil
}

// prepare makes a clone an individual, as a node does.
func (m *machine) prepare(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, commandLimit)
	defer cancel()
	b := random(24)
	m.identity = guest.Identity{
		Hostname: "ephemeral-" + m.ID(), MachineID: hex.EncodeToString(b[:16]),
		MAC:     net.HardwareAddr(append([]byte{0x02}, b[16:21]...)).String(),
		Address: net.IPv4(10, b[21], b[22], 2+b[23]%250).String() + "/32",
	}
	var err error
	m.prepared, err = m.guest.Prepare(ctx, m.identity)
	return err
}

// start is a prepared machine that ends with the test.
func (h *host) start(t *testing.T) *machine {
	t.Helper()
	m, err := h.clone(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	})
	if err := m.prepare(t.Context()); err != nil {
		t.Fatal(err)
	}
	return m
}

// exec runs a command and returns what it wrote.
func (m *machine) exec(ctx context.Context, c guest.Command) (stdout, stderr string, exit guest.Exit, err error) {
	ctx, cancel := context.WithTimeout(ctx, commandLimit)
	defer cancel()
	var out, errs bytes.Buffer
	exit, err = m.guest.Exec(ctx, c, &out, &errs)
	return out.String(), errs.String(), exit, err
}

// ask runs a command that must succeed and returns its output.
func (m *machine) ask(ctx context.Context, c guest.Command) (string, error) {
	stdout, stderr, exit, err := m.exec(ctx, c)
	if err == nil && (exit.Outcome != "exited" || exit.Code != 0) {
		err = fmt.Errorf("%.200q: %s %d %s: %s", c.Args, exit.Outcome, exit.Code, exit.Detail, stderr)
	}
	return stdout, err
}

// script is a Python program with an input.
func script(user, text string, stdin io.Reader) guest.Command {
	return guest.Command{Args: []string{"python3", "-u", "-c", text}, User: user, Stdin: stdin}
}

// shell is a script of sh.
func shell(user, text string) guest.Command {
	return guest.Command{Args: []string{"sh", "-c", text}, User: user}
}

func (m *machine) must(t *testing.T, c guest.Command) string {
	t.Helper()
	out, err := m.ask(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(out)
}

// packets is how many the machine has tried to send.
func (m *machine) packets(t *testing.T) int64 {
	t.Helper()
	packets, _, err := m.Egress()
	if err != nil {
		t.Fatal(err)
	}
	return packets
}

func random(n int) []byte {
	b := make([]byte, n)
	_, _ = rand.Read(b) // never fails on Linux; it ends the program instead
	return b
}

// eventually waits until check is satisfied.
func eventually(t *testing.T, check func() error) {
	t.Helper()
	var err error
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		if err = check(); err == nil {
			return
		}
	}
	t.Error(err)
}
