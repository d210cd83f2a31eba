package cloudhypervisor

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/ephemeral-run/ephemeral/vmm"
	"github.com/ephemeral-run/ephemeral/vmm/hypervisor"
)

// Files of a template beside its memory. The names of the first two are Cloud Hypervisor's.
const (
	configFile   = "config.json"
	stateFile    = "state.json"
	memoryFile   = "memory-ranges" // memory that is not in a shared file
	manifestFile = "cloud-hypervisor.json"

	snapshotDir = "snapshot" // in the machine's directory, while a template is made
	cloneDir    = "clone"    // in the machine's directory: what it was restored from
)

// Bounds of what is read of a template, in bytes. A configuration has 2 KB, a state 50 KB and more with more vCPUs.
const (
	maxConfig = 256 << 10
	maxState  = 64 << 20
)

// manifest is what a clone must have in common with the template's machine, and its files' digests.
type manifest struct {
	hypervisor.Made
	Config string `json:"config_sha256"`
	State  string `json:"state_sha256"`
	Copied bool   `json:"copied,omitempty"` // its memory was written by the snapshot, and clones copy it
}

// Boot starts a machine from its image.
func (d *Driver) Boot(ctx context.Context, s vmm.Spec) (vmm.Machine, error) {
	if err := hypervisor.Check(s); err != nil {
		return nil, fmt.Errorf("boot machine %s: %w", s.ID, err)
	}
	for _, path := range []string{s.Image.Kernel, s.Image.Initramfs, s.Image.RootFS} {
		if _, err := os.Stat(path); err != nil {
			return nil, fmt.Errorf("boot machine %s: %w", s.ID, err)
		}
	}
	var writable []string
	copied := false
	if s.RAM != "" {
		copied = !d.shares(s)
	}
	if s.RAM != "" && !copied {
		if err := hypervisor.PrepareRAM(s); err != nil {
			return nil, fmt.Errorf("boot machine %s: memory file: %w", s.ID, err)
		}
		writable = []string{filepath.Dir(s.RAM)}
	}
	m, err := d.start(ctx, s, visible(s), writable)
	if err != nil {
		return nil, err
	}
	m.copied = copied
	if err := m.boot(ctx); err != nil {
		return nil, m.abort(fmt.Errorf("boot machine %s: %w", s.ID, err))
	}
	return m, nil
}

// shares tells whether clones can map the memory file that the machine is to have. Where they cannot, its memory is written
// when it is snapshotted, and each clone takes a copy of all of it.
func (d *Driver) shares(s vmm.Spec) bool {
	err := d.mapping(filepath.Dir(s.RAM))
	if err != nil {
		slog.Warn("cloud-hypervisor: clones cannot share their template's memory, each takes a copy: use a data directory on ext4, XFS, Btrfs or tmpfs",
			"file", s.RAM, "error", err)
	}
	return err == nil
}

// boot creates and starts the machine in a fresh process.
func (m *machine) boot(ctx context.Context) error {
	s := m.Spec
	config := m.driver.bootConfig(s)
	if m.copied {
		config.Memory = plainMemory(s)
	}
	if err := m.api.create(ctx, config); err != nil {
		return err
	}
	if s.NIC != nil {
		if err := m.withTap(func(fd int) error { return m.api.addNet(ctx, nicConfig(*s.NIC), fd) }); err != nil {
			return err
		}
	}
	if err := m.api.boot(ctx); err != nil {
		return err
	}
	m.state = stateRunning
	return m.hub.open()
}

// withTap calls fn with the tap's descriptor, or -1 when there is none to pass on.
func (m *machine) withTap(fn func(fd int) error) error {
	if m.Spec.NIC == nil || m.Spec.NIC.File == nil {
		return fn(-1)
	}
	raw, err := m.Spec.NIC.File.SyscallConn() // unlike Fd, keeps it from being closed meanwhile
	if err != nil {
		return fmt.Errorf("tap: %w", err)
	}
	cerr := raw.Control(func(fd uintptr) { err = fn(int(fd)) })
	return errors.Join(cerr, err)
}

// Snapshot makes a template of the machine: its state goes to dir, its memory is in spec.RAM already. The machine can
// only be closed afterwards.
func (m *machine) Snapshot(ctx context.Context, dir string) error {
	return m.operate(ctx, "snapshot", func(ctx context.Context) error {
		switch {
		case m.Spec.RAM == "":
			return fmt.Errorf("%w: its memory is not in a file", vmm.ErrState)
		case m.state != statePaused:
			return fmt.Errorf("%w: it is %s", vmm.ErrState, m.state)
		case m.hub.connected():
			return fmt.Errorf("%w: it is connected", vmm.ErrState)
		case m.snapshotted:
			return fmt.Errorf("%w: it was snapshotted", vmm.ErrState)
		}
		m.snapshotted = true // from here on the file must not change
		return m.save(ctx, dir)
	})
}

// save has the process write into its own directory, and takes what it wrote from there: it needs no access to the
// template's, and what it wrote is checked.
func (m *machine) save(ctx context.Context, dir string) (err error) {
	from := filepath.Join(m.Spec.Dir, snapshotDir)
	if err := os.Mkdir(from, 0o700); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(from)) }()
	if err := os.Lchown(from, m.hub.owner, -1); err != nil {
		return err
	}
	if err := m.api.snapshot(ctx, from); err != nil {
		return err
	}
	if err := m.keepMemory(filepath.Join(from, memoryFile)); err != nil {
		return err
	}
	w := manifest{Made: m.Made(m.driver), Copied: m.copied}
	if w.Config, err = keep(filepath.Join(from, configFile), filepath.Join(dir, configFile), maxConfig); err != nil {
		return err
	}
	if w.State, err = keep(filepath.Join(from, stateFile), filepath.Join(dir, stateFile), maxState); err != nil {
		return err
	}
	content, err := json.Marshal(w)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, manifestFile), append(content, '\n'), 0o444)
}

// keepMemory makes the memory that a snapshot wrote the machine's memory file; with a shared file it must have written none.
func (m *machine) keepMemory(from string) error {
	info, err := os.Lstat(from)
	switch size := int64(m.Spec.Shape.MemoryMiB) << 20; {
	case errors.Is(err, fs.ErrNotExist) && !m.copied:
		return nil
	case err != nil:
		return err
	case !m.copied:
		return errors.New("the snapshot has memory of its own")
	case !info.Mode().IsRegular() || info.Size() != size:
		return fmt.Errorf("the snapshot's memory is %v of %d bytes, not a file of %d", info.Mode(), info.Size(), size)
	}
	return os.Rename(from, m.Spec.RAM)
}

// keep copies a file that the process has written, and returns its digest. Clones read it under other users.
func keep(from, to string, limit int64) (string, error) {
	content, err := readFile(from, limit)
	if err != nil {
		return "", err
	}
	f, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o444)
	if err != nil {
		return "", err
	}
	_, err = f.Write(content)
	if err = errors.Join(err, f.Chmod(0o444), f.Sync(), f.Close()); err != nil {
		return "", errors.Join(err, os.Remove(to))
	}
	return digest(content), nil
}

// readFile reads a regular file of at most limit bytes.
func readFile(path string, limit int64) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() || info.Size() > limit {
		return nil, fmt.Errorf("%s: %v of %d bytes, not a file of at most %d", path, info.Mode(), info.Size(), limit)
	}
	content, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err == nil && int64(len(content)) > limit {
		err = fmt.Errorf("%s has more than %d bytes", path, limit)
	}
	return content, err
}

func digest(content []byte) string {
	sum := sha256.Sum256(content)
	return hex.EncodeToString(sum[:])
}

// restore loads the template in a fresh process.
func (m *machine) restore(ctx context.Context, dir string) error {
	err := m.withTap(func(fd int) error { return m.api.restore(ctx, dir, fd) })
	var refused *APIError
	if errors.As(err, &refused) && unfit(refused) {
		return fmt.Errorf("%w: %w", vmm.ErrTemplate, err)
	}
	if err != nil {
		return err
	}
	m.state = statePaused
	return m.hub.open()
}

// unfit tells whether a refused restore is the template's fault. Its files are as they were made, so what remains is a host
// on which it cannot run: another CPU. Everything else, a tap or a socket for example, is the clone's.
func unfit(e *APIError) bool {
	if e.Status != http.StatusInternalServerError {
		return false // the call was wrong, not what it named
	}
	return e.says("CPUID") || e.says("CpuId") || e.says("deserialize") || e.says("Failed to restore CPU") || e.says("MSR")
}

// writeClone makes the directory that a clone is restored from: its own configuration, and the template's state; also its
// memory, when that is copied, else "".
func writeClone(dir string, config []byte, state, memory string) error {
	if err := os.Mkdir(dir, 0o755); err != nil {
		return err
	}
	// The process may run under another user, whatever the umask here is.
	if err := os.Chmod(dir, 0o755); err != nil {
		return err
	}
	path := filepath.Join(dir, configFile)
	if err := os.WriteFile(path, config, 0o444); err != nil {
		return err
	}
	if memory != "" {
		if err := os.Symlink(memory, filepath.Join(dir, memoryFile)); err != nil {
			return err
		}
	}
	return errors.Join(os.Chmod(path, 0o444), os.Symlink(state, filepath.Join(dir, stateFile)))
}

// fit compares a template with what a clone here would be, and returns the clone's configuration, and the memory that it
// copies; "": it maps it.
func (d *Driver) fit(t vmm.Template, s vmm.Spec) (clone []byte, memory string, err error) {
	var got manifest
	if err := hypervisor.ReadManifest(filepath.Join(t.Dir, manifestFile), &got); err != nil {
		return nil, "", err
	}
	if err := hypervisor.Fit(d, t, got.Made, s); err != nil {
		return nil, "", err
	}
	state, err := readFile(filepath.Join(t.Dir, stateFile), maxState)
	if err != nil {
		return nil, "", err
	}
	config, err := readFile(filepath.Join(t.Dir, configFile), maxConfig)
	if err != nil {
		return nil, "", err
	}
	if digest(state) != got.State || digest(config) != got.Config {
		return nil, "", errors.New("its state or configuration is not what was saved")
	}
	if got.Copied {
		clone, err = cloneConfig(config, s, "", d.landlock)
		return clone, t.RAM, err
	}
	clone, err = cloneConfig(config, s, t.RAM, d.landlock)
	return clone, "", err
}
