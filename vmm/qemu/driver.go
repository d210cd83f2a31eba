// Package qemu is the driver for QEMU: emulation (TCG) on hosts without usable KVM, hardware virtualisation otherwise.
//
// QEMU has no socket files here. It inherits one end of two socket pairs, the monitor and a serial line; over the line
// guestagent/proto/mux carries the ports of the machine. A template is the guest's memory, written in place through a
// shared mapping, and the rest of the machine's state, some hundred KiB; clones map the memory privately.
package qemu

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/ephemeral-run/ephemeral/vmm"
)

// Config is what an operator can choose.
type Config struct {
	Path    string `env:"EPHEMERAL_QEMU" envDefault:"qemu-system-x86_64" help:"QEMU program (7.2 or newer), a path or a name looked up in PATH"`
	Accel   string `env:"EPHEMERAL_QEMU_ACCEL" envDefault:"auto" help:"kvm, tcg (emulation), or auto: kvm where it is usable"`
	TBSize  int    `env:"EPHEMERAL_QEMU_TB_SIZE" envDefault:"64" help:"MiB of translated code that an emulated machine keeps: less memory against speed"`
	VMGenID bool   `env:"EPHEMERAL_QEMU_VMGENID" envDefault:"true" help:"tell clones that they are clones through the VM generation ID"`
	Console bool   `env:"EPHEMERAL_QEMU_CONSOLE" envDefault:"false" help:"write the guest's console to console.log in the machine's directory (debugging; slow)"`
}

// Driver makes machines with one QEMU program.
type Driver struct {
	config  Config
	path    string // absolute
	version string
	release release
	kvm     bool
	cpu     string
	data    []string // directories with QEMU's firmware
	sealed  sealedCache
}

var _ vmm.Driver = (*Driver)(nil)

// release is QEMU's version as numbers.
type release struct{ major, minor int }

func (r release) atLeast(major, minor int) bool {
	return r.major > major || r.major == major && r.minor >= minor
}

// probeTimeout bounds each question to the program at start.
const probeTimeout = 20 * time.Second

// New finds the program, asks it for its version, and chooses the accelerator. It fails when the program is missing or
// too old, and when KVM is demanded but not usable.
func New(config Config) (*Driver, error) {
	d := &Driver{config: config}
	path, err := exec.LookPath(config.Path)
	if err != nil {
		return nil, fmt.Errorf("find QEMU: %w (install qemu-system-x86 or set EPHEMERAL_QEMU)", err)
	}
	if d.path, err = filepath.Abs(path); err != nil {
		return nil, fmt.Errorf("find QEMU: %w", err)
	}
	if config.TBSize < 1 || config.TBSize > 4096 {
		return nil, fmt.Errorf("EPHEMERAL_QEMU_TB_SIZE is %d, not 1 to 4096 MiB", config.TBSize)
	}
	if err := d.probe(); err != nil {
		return nil, err
	}
	if err := d.chooseAccelerator(); err != nil {
		return nil, err
	}
	return d, nil
}

var versionLine = regexp.MustCompile(`^QEMU emulator version ((\d{1,4})\.(\d{1,4})\.\d{1,4}[^\n]{0,200})`)

// probe asks the program for its version and its data directories.
func (d *Driver) probe() error {
	out, err := d.ask("--version")
	if err != nil {
		return err
	}
	found := versionLine.FindStringSubmatch(out)
	if found == nil {
		return fmt.Errorf("%s --version answers %.80q, which is no QEMU", d.path, out)
	}
	d.version = strings.TrimSpace(found[1])
	d.release.major, _ = strconv.Atoi(found[2])
	d.release.minor, _ = strconv.Atoi(found[3])
	if !d.release.atLeast(7, 2) {
		return fmt.Errorf("%s is version %s, older than 7.2", d.path, d.version)
	}
	if out, err = d.ask("-L", "help"); err != nil {
		return err
	}
	for line := range strings.Lines(out) {
		dir := filepath.Clean(strings.TrimSpace(line))
		// It also names directories of packages that are not installed, as those of network boot.
		if info, err := os.Stat(dir); filepath.IsAbs(dir) && err == nil && info.IsDir() {
			d.data = append(d.data, dir)
		}
	}
	return nil
}

func (d *Driver) ask(args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), probeTimeout)
	defer cancel()
	out, err := exec.CommandContext(ctx, d.path, args...).Output()
	if err != nil {
		return "", fmt.Errorf("run %s %s: %w", d.path, strings.Join(args, " "), err)
	}
	return string(out), nil
}

func (d *Driver) chooseAccelerator() error {
	switch d.config.Accel {
	case "auto":
		d.kvm, _ = vmm.KVMUsable()
	case "kvm":
		ok, reason := vmm.KVMUsable()
		if !ok {
			return fmt.Errorf("EPHEMERAL_QEMU_ACCEL is kvm, but: %s", reason)
		}
		d.kvm = true
	case "tcg":
	default:
		return fmt.Errorf("EPHEMERAL_QEMU_ACCEL is %q, not auto, kvm or tcg", d.config.Accel)
	}
	if !d.kvm {
		d.cpu = "tcg max"
		return nil
	}
	model, err := vmm.HostCPU()
	if err != nil {
		return fmt.Errorf("identify the CPU: %w", err)
	}
	d.cpu = "kvm " + model
	return nil
}

// Name is "qemu".
func (d *Driver) Name() string { return "qemu" }

// Version is QEMU's, with the distribution's package version where it tells one.
func (d *Driver) Version() string { return d.version }

// Isolation is vmm.KVM or vmm.Emulated.
func (d *Driver) Isolation() vmm.Isolation {
	if d.kvm {
		return vmm.KVM
	}
	return vmm.Emulated
}

// CPUModel names the CPU that guests see, with those options of the configuration that a clone must share with its
// template. It belongs into the template's key.
func (d *Driver) CPUModel() string {
	model := d.cpu
	if !d.config.VMGenID {
		model += " no-vmgenid"
	}
	if d.config.Console {
		model += " console"
	}
	return model
}

// Close gives back what the driver keeps between machines: memory of templates in use. Machines must be closed before.
func (d *Driver) Close() error { return d.sealed.close() }
