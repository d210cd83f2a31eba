package provision

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"github.com/ephemeral-run/ephemeral/vmm"
	"github.com/ephemeral-run/ephemeral/vmm/jail"
)

// Rest is what a machine does while it waits to be claimed.
type Rest string

// A paused machine uses no CPU at all and is resumed by its claimant; a running one needs no resuming. Auto is paused
// where machines are emulated, running otherwise.
const (
	RestAuto    Rest = "auto"
	RestPaused  Rest = "paused"
	RestRunning Rest = "running"
)

// Config says where machines live and how large they are.
type Config struct {
	DataDir         string        `env:"EPHEMERAL_DATA_DIR" envDefault:"/var/lib/ephemeral" help:"directory of everything that is kept: images, templates, machines, the private redis"`
	Node            string        `env:"EPHEMERAL_NODE" help:"the node's id, 1 to 40 lower-case letters, digits and dashes; empty: made once and kept in the data directory"`
	MemoryMiB       int           `env:"EPHEMERAL_MACHINE_MEMORY_MIB" envDefault:"512" help:"memory of a machine, MiB"`
	VCPUs           int           `env:"EPHEMERAL_MACHINE_VCPUS" envDefault:"1" help:"virtual CPUs of a machine"`
	Rest            Rest          `env:"EPHEMERAL_POOL_REST" envDefault:"auto" help:"what a ready machine does until it is claimed: paused, running, or auto (paused where machines are emulated)"`
	Spares          int           `env:"EPHEMERAL_POOL_SPARES" envDefault:"1" help:"launched, jailed, empty hypervisor processes kept in hand, so that making a machine starts at loading the template; 0: none"`
	TemplateTimeout time.Duration `env:"EPHEMERAL_TEMPLATE_TIMEOUT" envDefault:"3m" help:"how long making a template may take"`
	Jail            jail.Config
}

// Shape is the size of machines that the configuration asks for.
func (c Config) Shape() vmm.Shape { return vmm.Shape{VCPUs: c.VCPUs, MemoryMiB: c.MemoryMiB} }

// Validate says all that is wrong with the configuration.
func (c Config) Validate() error {
	var errs []error
	check := func(ok bool, format string, args ...any) {
		if !ok {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	check(filepath.IsAbs(c.DataDir), "EPHEMERAL_DATA_DIR %q must be an absolute path", c.DataDir)
	check(c.Node == "" || nodeID.MatchString(c.Node), "EPHEMERAL_NODE %q must match %s", c.Node, nodeID)
	check(c.MemoryMiB >= 64 && c.MemoryMiB <= 256<<10, "EPHEMERAL_MACHINE_MEMORY_MIB is %d, must be 64 to 262144", c.MemoryMiB)
	check(c.VCPUs >= 1 && c.VCPUs <= 64, "EPHEMERAL_MACHINE_VCPUS is %d, must be 1 to 64", c.VCPUs)
	check(c.Rest == RestAuto || c.Rest == RestPaused || c.Rest == RestRunning, "EPHEMERAL_POOL_REST is %q, must be auto, paused or running", c.Rest)
	check(c.Spares >= 0 && c.Spares <= 64, "EPHEMERAL_POOL_SPARES is %d, must be 0 to 64", c.Spares)
	check(c.TemplateTimeout > 0, "EPHEMERAL_TEMPLATE_TIMEOUT is %s, must be positive", c.TemplateTimeout)
	return errors.Join(errs...)
}

var nodeID = regexp.MustCompile(`^[a-z0-9][a-z0-9-]{0,39}$`)

// NodeID is the configured id of the node, or the one kept in the data directory, or a new one that is kept there from
// now on: "node-" and eight random hexadecimal digits, since all nodes of a cell need different ones.
func (c Config) NodeID() (string, error) {
	if c.Node != "" {
		return c.Node, nil
	}
	path := filepath.Join(c.DataDir, "node")
	for {
		b, err := os.ReadFile(path)
		if err == nil {
			id := strings.TrimSpace(string(b))
			if !nodeID.MatchString(id) {
				return "", fmt.Errorf("node id %.64q in %s must match %s", id, path, nodeID)
			}
			return id, nil
		}
		if !errors.Is(err, fs.ErrNotExist) {
			return "", fmt.Errorf("read node id: %w", err)
		}
		if err := keepNodeID(path); err != nil && !errors.Is(err, fs.ErrExist) {
			return "", fmt.Errorf("keep node id: %w", err)
		}
	}
}

// keepNodeID makes the file with a new id, whole or not at all. fs.ErrExist: another process was first.
func keepNodeID(path string) error {
	if err := os.MkdirAll(filepath.Dir(path), dirMode); err != nil {
		return err
	}
	tmp, err := os.CreateTemp(filepath.Dir(path), ".node-*")
	if err != nil {
		return err
	}
	defer func() { _ = os.Remove(tmp.Name()) }()
	_, err = fmt.Fprintf(tmp, "node-%s\n", randomHex(4))
	if err := errors.Join(err, tmp.Sync(), tmp.Close()); err != nil {
		return err
	}
	return os.Link(tmp.Name(), path)
}

// randomHex is n random bytes in hexadecimal. crypto/rand never fails on Linux; it ends the program instead.
func randomHex(n int) string {
	b := make([]byte, n)
	_, _ = rand.Read(b)
	return hex.EncodeToString(b)
}
