// Package kvmbox gives tests a place with usable KVM. Where this host's own serves, that is this host. Elsewhere it is a box:
// a virtual machine whose processor QEMU emulates, AMD's SVM with nested paging included, so that real KVM and real
// hypervisors run in it. Everything in a box is several times slower than on hardware: compare ratios only.
package kvmbox

import (
	"context"
	"fmt"
	"io"
	"path/filepath"

	"github.com/ephemeral-run/ephemeral/vmm"
)

// Place is where commands run as root with usable KVM.
type Place interface {
	// Describe names the place, for people.
	Describe() string
	// Boxed tells whether it is a box: then everything takes longer.
	Boxed() bool
	// Path is where the file or directory that was carried under that name is found. In a box it may be written to, which
	// changes nothing here; on this host it is the original.
	Path(name string) string
	// Run runs a command to its end and returns its exit code, 128+n for signal n. When ctx ends it is killed with all its
	// descendants. An error says that the outcome is not known.
	Run(ctx context.Context, c Command) (int, error)
	// ReadFile returns a file's content; it fails when that is longer than limit bytes.
	ReadFile(ctx context.Context, path string, limit int64) ([]byte, error)
	// Close gives the place back. A box and all that was written in it is gone then. It is idempotent.
	Close() error
}

// Command is a command to run.
type Command struct {
	Args   []string // program, looked up in PATH, and arguments
	Env    []string // KEY=VALUE beside the place's own
	Dir    string   // working directory; empty: the root
	Stdout io.Writer
	Stderr io.Writer
}

// Options say what a place is to be like.
type Options struct {
	// Dir keeps what boxes are made from; it may be deleted when no box runs. Other users must be able to enter it.
	Dir string
	// Root is the checkout that the agent, the first process of a box, is built from.
	Root string
	// Carry is what comes along: host paths of files and directories by the name to have in the place, slashes allowed.
	// Symbolic links are carried as such.
	Carry map[string]string
	// MemoryMiB of a box; 0: 8192. The host gives as much of it as is used.
	MemoryMiB int
	// Box demands a box even where this host's KVM serves.
	Box bool
	// Progress is called with a line for each step; may be nil.
	Progress func(message string)
}

// defaultMemory of a box, in MiB, suffices for twenty machines of 384 MiB that share their template's memory.
const defaultMemory = 8192

// Open returns a place. A host has one box at a time: others wait for it until ctx ends.
func Open(ctx context.Context, o Options) (Place, error) {
	if o.Progress == nil {
		o.Progress = func(string) {}
	}
	if o.MemoryMiB == 0 {
		o.MemoryMiB = defaultMemory
	}
	for name, path := range o.Carry {
		if !filepath.IsLocal(name) || !filepath.IsAbs(path) {
			return nil, fmt.Errorf("carry %q as %q: want an absolute path and a name below the place's own directory", path, name)
		}
	}
	usable, reason := vmm.KVMUsable()
	if usable && !o.Box {
		o.Progress("this host's own KVM serves")
		return &host{carry: o.Carry}, nil
	}
	if !usable {
		o.Progress("no usable KVM on this host (" + reason + "): taking a box")
	}
	return openBox(ctx, o)
}
