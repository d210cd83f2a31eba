package cloudhypervisor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ephemeral-run/ephemeral/vmm"
	"github.com/ephemeral-run/ephemeral/vmm/hypervisor"
)

// Config is what an operator can choose.
type Config struct {
	Path    string `env:"EPHEMERAL_CLOUD_HYPERVISOR" envDefault:"cloud-hypervisor" help:"Cloud Hypervisor program (53.x), a path or a name looked up in PATH"`
	Console bool   `env:"EPHEMERAL_CLOUD_HYPERVISOR_CONSOLE" envDefault:"false" help:"write the guest's console to console.log in the machine's directory (debugging; slow)"`
}

// Driver makes machines with one Cloud Hypervisor program. It keeps nothing between machines.
type Driver struct {
	config   Config
	program  Program
	cpu      string
	landlock bool
	kvm      bool                   // false only in tests
	mapping  func(dir string) error // whether clones can map a file there
}

var _ vmm.Driver = (*Driver)(nil)

// Option changes a driver in tests.
type Option func(*Driver)

// WithoutKVM takes a program that makes no machines but behaves as if, like that of package chfake.
func WithoutKVM() Option { return func(d *Driver) { d.kvm = false } }

// WithoutSharing has a driver behave as where clones cannot map their template's memory.
func WithoutSharing() Option {
	return func(d *Driver) {
		d.mapping = func(string) error { return errors.New("sharing is switched off") }
	}
}

// New finds the program, checks its version, and sees that KVM is usable.
func New(config Config, options ...Option) (*Driver, error) {
	d := &Driver{config: config, kvm: true, mapping: hypervisor.SharedMapping}
	for _, o := range options {
		o(d)
	}
	var err error
	if d.program, err = Find(config); err != nil {
		return nil, err
	}
	if d.kvm {
		if ok, reason := vmm.KVMUsable(); !ok {
			return nil, fmt.Errorf("no KVM for Cloud Hypervisor: %s", reason)
		}
	}
	if d.cpu, err = cpuModel(); err != nil {
		return nil, err
	}
	d.landlock = LandlockABI() >= MinLandlock
	if d.program.Warning != "" {
		slog.Warn("cloud-hypervisor", "path", d.program.Path, "warning", d.program.Warning)
	}
	if !d.landlock {
		slog.Warn("cloud-hypervisor: this kernel's landlock is too old to confine it", "abi", LandlockABI(), "needed", MinLandlock)
	}
	return d, nil
}

// Program is a Cloud Hypervisor on this host.
type Program struct {
	Path    string // absolute
	Version string // e.g. "53.0"
	Warning string // why it should be another version, if so
}

// Versions of which machines are known to work.
const (
	wantedMajor   = 53
	acceptedMajor = 52
)

// probeTimeout bounds the question for the version.
const probeTimeout = 20 * time.Second

var versionLine = regexp.MustCompile(`^cloud-hypervisor v((\d{1,4})\.\d{1,4}(?:\.\d{1,4})?[^\s]{0,100})`)

// Why there is no program to use.
var (
	ErrNotFound = errors.New("no Cloud Hypervisor")
	ErrVersion  = errors.New("this version of Cloud Hypervisor is not supported")
)

// Find looks for the program and asks it for its version. ErrNotFound: there is none. ErrVersion: it is of a version with
// which machines are not known to work.
func Find(c Config) (Program, error) {
	path, err := exec.LookPath(c.Path)
	if errors.Is(err, exec.ErrNotFound) || errors.Is(err, fs.ErrNotExist) {
		return Program{}, fmt.Errorf("%w: install cloud-hypervisor %d.x or set EPHEMERAL_CLOUD_HYPERVISOR: %w", ErrNotFound, wantedMajor, err)
	}
	if err != nil {
		return Program{}, fmt.Errorf("find Cloud Hypervisor: %w", err)
	}
	if path, err = filepath.Abs(path); err != nil {
		return Program{}, fmt.Errorf("find Cloud Hypervisor: %w", err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), probeTimeout)
	defer cancel()
	out, err := exec.CommandContext(ctx, path, "--version").Output()
	if err != nil {
		return Program{}, fmt.Errorf("run %s --version: %w", path, err)
	}
	p := Program{Path: path}
	if p.Version, p.Warning, err = version(string(out)); err != nil {
		return Program{}, fmt.Errorf("%s: %w", path, err)
	}
	return p, nil
}

// version reads what --version prints, and judges it.
func version(printed string) (text, warning string, err error) {
	found := versionLine.FindStringSubmatch(printed)
	if found == nil {
		return "", "", fmt.Errorf("--version answers %.80q, which is no Cloud Hypervisor", printed)
	}
	major, _ := strconv.Atoi(found[2])
	switch major {
	case wantedMajor:
	case acceptedMajor:
		warning = fmt.Sprintf("version %s is accepted, but %d.x is what machines are tested with: the guest's clock stands still while a clone is not running", found[1], wantedMajor)
	default:
		return "", "", fmt.Errorf("%w: it is %s, install %d.x", ErrVersion, found[1], wantedMajor)
	}
	return found[1], warning, nil
}

// MinLandlock is the ABI of landlock that Cloud Hypervisor asks for, that of Linux 6.2.
const MinLandlock = 3

// LandlockABI is the version of landlock that the kernel offers, landlock(7); 0: none.
func LandlockABI() int {
	abi, _, errno := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, 0, 0, unix.LANDLOCK_CREATE_RULESET_VERSION)
	if errno != 0 {
		return 0
	}
	return int(abi)
}

// cpuModel names what a clone must have in common with its template: the CPU, and the kernel, which decides what KVM
// shows of it.
func cpuModel() (string, error) {
	cpu, err := vmm.HostCPU()
	if err != nil {
		return "", fmt.Errorf("identify the CPU: %w", err)
	}
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return "", fmt.Errorf("identify the kernel: %w", err)
	}
	return cpu + " on Linux " + unix.ByteSliceToString(u.Release[:]), nil
}

// Name is "cloud-hypervisor".
func (d *Driver) Name() string { return "cloud-hypervisor" }

// Version is the program's.
func (d *Driver) Version() string { return d.program.Version }

// Isolation is vmm.KVM.
func (d *Driver) Isolation() vmm.Isolation { return vmm.KVM }

// CPUModel names the CPU that guests see, with those options of the configuration that a clone must share with its
// template. It belongs into the template's key.
func (d *Driver) CPUModel() string {
	model := d.cpu
	if d.config.Console {
		model += " console"
	}
	if d.landlock {
		model += " landlock"
	}
	return model
}

// Close does nothing: the driver keeps nothing between machines.
func (d *Driver) Close() error { return nil }
