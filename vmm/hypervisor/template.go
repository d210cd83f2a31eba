package hypervisor

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/ephemeral-run/ephemeral/vmm"
)

// Check refuses a spec before anything is started.
func Check(s vmm.Spec) error {
	switch {
	case s.ID == "" || strings.ContainsAny(s.ID, ",= /"):
		return fmt.Errorf("machine id %q is invalid", s.ID)
	case !Plain(s.Dir):
		return fmt.Errorf("machine directory %q is not absolute and plain", s.Dir)
	case s.Shape.VCPUs < 1 || s.Shape.VCPUs > 64:
		return fmt.Errorf("%d vCPUs, not 1 to 64", s.Shape.VCPUs)
	case s.Shape.MemoryMiB < 64 || s.Shape.MemoryMiB > 256<<10:
		return fmt.Errorf("%d MiB of memory, not 64 to 262144", s.Shape.MemoryMiB)
	case s.RAM != "" && !Plain(s.RAM):
		return fmt.Errorf("memory file %q is not absolute and plain", s.RAM)
	case s.Image.RootFS == "" || s.Image.Kernel == "" || s.Image.Initramfs == "":
		return errors.New("the image has no files")
	case s.NIC != nil && s.NIC.File == nil && s.NIC.Tap == "":
		return errors.New("the network card has no tap")
	case s.Launcher == nil:
		return errors.New("no launcher")
	}
	return nil
}

// Plain tells whether a path means the same in a configuration, in a URL and to the kernel.
func Plain(path string) bool {
	return filepath.IsAbs(path) && filepath.Clean(path) == path && !strings.ContainsAny(path, "\x00\n?#%")
}

// Clone is the spec of a clone of t: image and memory are the template's, and so is the shape where the spec has none.
func Clone(t vmm.Template, s vmm.Spec) vmm.Spec {
	s.Image, s.RAM = t.Image, ""
	if s.Shape == (vmm.Shape{}) {
		s.Shape = t.Shape
	}
	return s
}

// PrepareRAM makes the memory file of a spec, sparse and owned like the machine's directory, if it is not there.
func PrepareRAM(s vmm.Spec) error {
	size := int64(s.Shape.MemoryMiB) << 20
	f, err := os.OpenFile(s.RAM, os.O_RDWR|os.O_CREATE|os.O_EXCL|unix.O_NOFOLLOW, 0o600)
	if errors.Is(err, os.ErrExist) {
		info, err := os.Stat(s.RAM)
		if err != nil {
			return err
		}
		if info.Size() != size {
			return fmt.Errorf("memory file %s has %d bytes, not %d", s.RAM, info.Size(), size)
		}
		return nil
	}
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	if err := f.Truncate(size); err != nil {
		return err
	}
	dir, err := os.Stat(s.Dir)
	if err != nil {
		return err
	}
	if owner, ok := dir.Sys().(*syscall.Stat_t); ok && int(owner.Uid) != os.Geteuid() {
		return f.Chown(int(owner.Uid), int(owner.Gid))
	}
	return nil
}

// Made is what a clone must have in common with its template's machine, whatever the driver. A driver's manifest embeds it.
type Made struct {
	Version string    `json:"version"`
	CPU     string    `json:"cpu"`
	Shape   vmm.Shape `json:"shape"`
	NIC     bool      `json:"nic"`
}

// maxManifest is the most that is read of a manifest, in bytes.
const maxManifest = 4096

// ReadManifest reads a template's manifest into v.
func ReadManifest(path string, v any) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	if err := json.NewDecoder(io.LimitReader(f, maxManifest)).Decode(v); err != nil {
		return fmt.Errorf("read %s: %w", path, err)
	}
	return nil
}

// Identity is what a driver is where it runs.
type Identity interface {
	Name() string
	Version() string
	CPUModel() string
}

// Fit says why a template, of which the manifest says made, cannot become the clone s with the driver d; nil: it can, as
// far as all drivers are concerned.
func Fit(d Identity, t vmm.Template, made Made, s vmm.Spec) error {
	ram, err := os.Stat(t.RAM)
	if err != nil {
		return err
	}
	switch {
	case t.Driver != d.Name():
		return fmt.Errorf("made by driver %q", t.Driver)
	case t.Version != d.Version():
		return fmt.Errorf("made with version %s, this is %s", t.Version, d.Version())
	case made.Version != d.Version():
		return fmt.Errorf("made with version %s, this is %s", made.Version, d.Version())
	case made.CPU != d.CPUModel():
		return fmt.Errorf("made on CPU %q, this is %q", made.CPU, d.CPUModel())
	case made.Shape != s.Shape:
		return fmt.Errorf("its shape is %+v, not %+v", made.Shape, s.Shape)
	case made.NIC != (s.NIC != nil):
		return fmt.Errorf("network card in the template: %t, in the machine: %t", made.NIC, s.NIC != nil)
	case !Plain(t.RAM) || !Plain(t.Dir):
		return fmt.Errorf("its paths %q and %q are not absolute and plain", t.Dir, t.RAM)
	case !ram.Mode().IsRegular() || ram.Size() != int64(made.Shape.MemoryMiB)<<20:
		return fmt.Errorf("its memory is %v of %d bytes, not a file of %d MiB", ram.Mode(), ram.Size(), made.Shape.MemoryMiB)
	}
	return nil
}
