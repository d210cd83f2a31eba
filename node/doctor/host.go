package doctor

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"

	"github.com/google/nftables"
	"golang.org/x/sys/unix"

	"github.com/ephemeral-run/ephemeral/images"
	"github.com/ephemeral-run/ephemeral/run"
	"github.com/ephemeral-run/ephemeral/vmm"
	"github.com/ephemeral-run/ephemeral/vmm/cloudhypervisor"
	"github.com/ephemeral-run/ephemeral/vmm/hypervisor"
)

// Host is what the checks ask of a host. System is the real one.
type Host interface {
	UID() int
	// KVM tells whether KVM runs stock guest kernels, and if not, why.
	KVM() (usable bool, reason string)
	// CloudHypervisor finds the program, a path or a name.
	CloudHypervisor(program string) (cloudhypervisor.Program, error)
	// LandlockABI is what the kernel offers of landlock; 0: none.
	LandlockABI() int
	// SharedMapping tells whether clones can map files in the file system of path, or of the nearest directory above it that
	// is there.
	SharedMapping(path string) error
	// OpenDevice opens a device for reading and writing, and closes it.
	OpenDevice(path string) error
	// ReadFile reads a small file.
	ReadFile(path string) ([]byte, error)
	// Writable tells whether files can be made in the directory.
	Writable(dir string) error
	// Output runs a program and returns what it prints, at most 64 KiB. ErrNoProgram: it is not installed.
	Output(ctx context.Context, name string, args ...string) (string, error)
	// NetworkNamespace makes a network namespace that ends at once; with tables it also reads its nftables.
	NetworkNamespace(tables bool) error
	// Space tells what is free in the file system of path, or of the nearest directory above it that is there.
	Space(path string) (Space, error)
	// OpenFiles is the limit of open files: the one in force and the one it can be raised to.
	OpenFiles() (soft, hard uint64, err error)
	// Persistence asks a Redis how it keeps its data.
	Persistence(ctx context.Context, url string) (run.Persistence, error)
	// Entropy tells whether the kernel's random generator is ready.
	Entropy() error
	// Image opens and verifies the image in dir.
	Image(dir string) (images.Image, error)
}

// ErrNoProgram says that a program is not installed.
var ErrNoProgram = errors.New("program not found")

// Space is what is free in a file system. Inodes and FreeInodes are 0 where it has no fixed number of them.
type Space struct {
	Dir                string // the directory that was looked at
	Bytes              uint64 // free to unprivileged users
	Inodes, FreeInodes uint64
}

// System is the host this process runs on.
type System struct{}

// UID implements Host.
func (System) UID() int { return os.Geteuid() }

// KVM implements Host.
func (System) KVM() (bool, string) { return vmm.KVMUsable() }

// CloudHypervisor implements Host.
func (System) CloudHypervisor(program string) (cloudhypervisor.Program, error) {
	return cloudhypervisor.Find(cloudhypervisor.Config{Path: program})
}

// LandlockABI implements Host.
func (System) LandlockABI() int { return cloudhypervisor.LandlockABI() }

// SharedMapping implements Host.
func (System) SharedMapping(path string) error {
	s, err := System{}.Space(path)
	if err != nil {
		return err
	}
	return hypervisor.SharedMapping(s.Dir)
}

// OpenDevice implements Host.
func (System) OpenDevice(path string) error {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	return f.Close()
}

// maxRead bounds what is read of a file and of a program's output, in bytes.
const maxRead = 64 << 10

// ReadFile implements Host.
func (System) ReadFile(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(io.LimitReader(f, maxRead))
}

// Writable implements Host.
func (System) Writable(dir string) error { return unix.Access(dir, unix.W_OK) }

// Output implements Host.
func (System) Output(ctx context.Context, name string, args ...string) (string, error) {
	path, err := exec.LookPath(name)
	if err != nil {
		return "", fmt.Errorf("%w: %s", ErrNoProgram, name)
	}
	out, err := exec.CommandContext(ctx, path, args...).CombinedOutput()
	text := strings.TrimSpace(strings.ToValidUTF8(string(out[:min(len(out), maxRead)]), "?"))
	if err != nil {
		line, _, _ := strings.Cut(text, "\n")
		return text, fmt.Errorf("%s: %w: %s", name, err, line)
	}
	return text, nil
}

// NetworkNamespace implements Host.
func (System) NetworkNamespace(tables bool) error {
	done := make(chan error, 1)
	go func() {
		// The thread is not unlocked: it ends with the goroutine, and the namespace with it.
		runtime.LockOSThread()
		done <- inNamespace(tables)
	}()
	return <-done
}

func inNamespace(tables bool) error {
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("unshare network: %w", err)
	}
	if !tables {
		return nil
	}
	conn, err := nftables.New()
	if err != nil {
		return fmt.Errorf("connect to nftables: %w", err)
	}
	// The first answer comes only from a kernel with nf_tables.
	if _, err := conn.ListTables(); err != nil {
		return fmt.Errorf("list nftables: %w", err)
	}
	return nil
}

// Space implements Host.
func (System) Space(path string) (Space, error) {
	dir, err := filepath.Abs(path)
	if err != nil {
		return Space{}, err
	}
	for {
		var st unix.Statfs_t
		err := unix.Statfs(dir, &st)
		if err == nil {
			return Space{Dir: dir, Bytes: st.Bavail * uint64(st.Bsize), Inodes: st.Files, FreeInodes: st.Ffree}, nil
		}
		if !errors.Is(err, os.ErrNotExist) || dir == "/" {
			return Space{}, fmt.Errorf("look at the file system of %s: %w", dir, err)
		}
		dir = filepath.Dir(dir)
	}
}

// OpenFiles implements Host.
func (System) OpenFiles() (soft, hard uint64, err error) {
	var lim unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &lim); err != nil {
		return 0, 0, fmt.Errorf("read the limit of open files: %w", err)
	}
	return lim.Cur, lim.Max, nil
}

// Persistence implements Host.
func (System) Persistence(ctx context.Context, url string) (run.Persistence, error) {
	return run.AskPersistence(ctx, url)
}

// Entropy implements Host.
func (System) Entropy() error {
	var b [16]byte
	if _, err := unix.Getrandom(b[:], unix.GRND_NONBLOCK); err != nil {
		return fmt.Errorf("getrandom: %w", err)
	}
	return nil
}

// Image implements Host.
func (System) Image(dir string) (images.Image, error) { return images.Open(dir) }
