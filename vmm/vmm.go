// Package vmm says what a machine is: one microVM, used by exactly one run, never reused. Drivers boot and restore
// machines; the sub-packages jail and network confine them, provision puts the parts together, pool keeps them ready.
// It knows nothing of runs or money.
package vmm

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"time"

	"github.com/ephemeral-run/ephemeral/images"
)

// Isolation says how strong the wall around a machine is.
type Isolation string

// KVM is hardware virtualisation; Emulated (TCG) is no security boundary.
const (
	KVM      Isolation = "kvm"
	Emulated Isolation = "emulated"
)

// Driver makes machines with one hypervisor.
type Driver interface {
	// Name is "qemu" or "cloud-hypervisor".
	Name() string
	// Version is the hypervisor binary's version. Templates are keyed by it.
	Version() string
	// Isolation is what machines of this driver get on this host.
	Isolation() Isolation
	// Boot starts a machine from the image. With spec.RAM set its memory is that file, shared, so that Snapshot makes a
	// template of it. It returns when the VMM runs; the guest may still be booting: Dial retries until its ctx ends.
	Boot(ctx context.Context, spec Spec) (Machine, error)
	// Restore starts a machine from a template, with its memory mapped privately. It returns it paused.
	Restore(ctx context.Context, t Template, spec Spec) (Machine, error)
}

// Shape is the size of a machine.
type Shape struct {
	VCPUs     int `json:"vcpus"`
	MemoryMiB int `json:"memory_mib"`
}

// Spec is everything a driver needs to make one machine. Who made the parts (directory, tap, jail) also removes them,
// after the machine is closed.
type Spec struct {
	ID       string // 12 hexadecimal digits from crypto/rand; also in the tap's name
	Dir      string // the machine's own directory; writable by it
	Image    images.Image
	Shape    Shape
	RAM      string // Boot only: file to use as shared guest memory
	NIC      *NIC   // nil: no network card
	Launcher Launcher
}

// NIC is the machine's network card on the host's side.
type NIC struct {
	Tap  string           // name of the tap device
	MAC  net.HardwareAddr // the guest's address
	File *os.File         // the opened tap queue, passed to the VMM; nil: open by name
}

// Template is a booted, warmed, paused machine kept as files that never change.
type Template struct {
	Dir     string // device state and manifest
	RAM     string // guest memory, read-only, mapped privately by every clone
	Image   images.Image
	Shape   Shape
	Key     string // digest over all that a clone must share with it: image, driver, version, CPU model, shape
	MadeAt  time.Time
	Driver  string
	Version string
}

// Machine is a running microVM. Its methods are safe for concurrent use.
type Machine interface {
	ID() string
	// Dial connects to a port the guest listens on. It retries while the guest is not up, until ctx ends.
	Dial(ctx context.Context, port uint32) (net.Conn, error)
	// Listen accepts connections the guest opens to a port of the host. Ports nobody listens on refuse the guest.
	Listen(port uint32) (net.Listener, error)
	Pause(ctx context.Context) error
	Resume(ctx context.Context) error
	// Disconnect ends every connection to the guest, for a template may have none open.
	Disconnect() error
	// Snapshot writes the device state of a paused, disconnected machine into dir. Its memory is spec.RAM.
	Snapshot(ctx context.Context, dir string) error
	Stats() (Stats, error)
	// Done is closed when the VMM has ended, by itself or by Close; Err then says why (nil after Close or power-off).
	Done() <-chan struct{}
	Err() error
	// Close destroys the machine: kills the VMM, waits for it, closes connections and listeners. It is idempotent.
	Close() error
}

// Clock is the way to the clock of a machine that was prepared.
type Clock interface {
	// Set sets it to the host's, and fails unless that is confirmed. It may be called just before a machine is resumed.
	Set(ctx context.Context) error
	// Right tells whether it is right without being set, on a machine that has run ever since it was.
	Right() bool
	// Close ends a Set that is under way.
	Close() error
}

// Stats is what the host sees of a machine.
type Stats struct {
	Pid          int
	PrivateBytes int64 // memory of its own: Private_Clean + Private_Dirty of /proc/pid/smaps_rollup, proc_pid_smaps(5)
	CPU          time.Duration
}

// Launcher starts a VMM inside its jail. It does not own Files.
type Launcher interface {
	Launch(ctx context.Context, c Command) (Process, error)
}

// Command is a program to launch. Paths are the same inside and outside of the jail.
type Command struct {
	Args     []string   // Args[0] is the absolute path of the program
	Files    []*os.File // inherited as descriptors 3, 4, ...
	ReadOnly []string   // files and directories to see beside the system's libraries
	Writable []string   // directories it may write to; the first is its working directory
	Devices  []string   // e.g. /dev/kvm
	Proc     bool       // show it /proc, of its own pid namespace only: for programs that open what they inherited by name
	Stderr   io.Writer  // diagnostics of the program; bounded by the receiver
	// OpenFiles is how many descriptors the program needs at least; 0: no more than any. A jail's limit is not below it.
	OpenFiles int
}

// Process is a launched program.
type Process interface {
	Pid() int              // of the program itself, in the host's pid namespace
	Done() <-chan struct{} // closed when it has ended and was reaped
	Err() error            // how it ended; nil for exit code 0
	Kill() error           // SIGKILL to it and everything in its jail; idempotent; does not wait
}

// What callers decide on with errors.Is.
var (
	// ErrClosed: the machine was closed or its VMM has ended.
	ErrClosed = errors.New("machine closed")
	// ErrTemplate: the template does not fit this driver, version, CPU or image, or its files are damaged.
	ErrTemplate = errors.New("template unusable")
	// ErrState: the machine's state does not allow the call, for example a snapshot of a running one.
	ErrState = errors.New("not possible in the machine's state")

	// How a machine ended that was not closed and did not power off; see Machine.Err.

	// ErrRebooted: the guest asked for a reset, which is the end of a machine.
	ErrRebooted = errors.New("guest rebooted")
	// ErrPanicked: the guest's kernel panicked.
	ErrPanicked = errors.New("guest panicked")
	// ErrVMM: the hypervisor's process failed or was killed.
	ErrVMM = errors.New("hypervisor failed")
)
