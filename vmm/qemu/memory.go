package qemu

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ephemeral-run/ephemeral/vmm"
)

// memory is a template's memory as a clone opens it.
type memory struct {
	file   string   // the template's own file
	sealed *os.File // or a sealed copy
	free   func()
}

// path is the name by which QEMU opens it. A sealed copy is inherited.
func (m memory) path(c *command) string {
	if m.sealed == nil {
		return m.file
	}
	c.byName = true
	return fmt.Sprintf("/proc/self/fd/%d", c.inherit(m.sealed))
}

// visible is what must be seen of the host to open it.
func (m memory) visible() []string {
	if m.sealed == nil {
		return []string{m.file}
	}
	return nil
}

func (m memory) release() { m.free() }

// memory makes a template's memory ready to be mapped by a clone. QEMU before 8.2 opens a memory file for writing even
// to map it privately, which a jailed one may not do and must not be allowed to: a clone that took over its QEMU could
// change all its siblings. For it the memory is copied, once for all clones, into a memory-backed file that the kernel
// guards against every change, and that may be opened for writing all the same.
func (d *Driver) memory(ctx context.Context, t vmm.Template) (memory, error) {
	if d.release.atLeast(8, 2) {
		return memory{file: t.RAM, free: func() {}}, nil
	}
	copied, err := d.sealed.acquire(ctx, t.RAM)
	if err != nil {
		return memory{}, err
	}
	return memory{sealed: copied.file, free: func() { d.sealed.release(copied) }}, nil
}

// sealedCache keeps the sealed copies that clones use, and the last one that none uses any more.
type sealedCache struct {
	mu      sync.Mutex
	entries map[sealedKey]*sealed
	idle    *sealed
}

// sealedKey tells a memory file from another that took its name.
type sealedKey struct {
	path     string
	dev, ino uint64
	size     int64
	modified time.Time
}

// sealed is one copy. Its fields are valid when ready is closed.
type sealed struct {
	key   sealedKey
	users int // under sealedCache.mu
	ready chan struct{}
	file  *os.File
	err   error
}

// acquire returns the copy of a memory file, and makes it if there is none.
func (c *sealedCache) acquire(ctx context.Context, path string) (*sealed, error) {
	from, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", vmm.ErrTemplate, err)
	}
	defer func() { _ = from.Close() }()
	key, err := keyOf(from)
	if err != nil {
		return nil, err
	}
	for {
		c.mu.Lock()
		if c.entries == nil {
			c.entries = make(map[sealedKey]*sealed)
		}
		s, found := c.entries[key]
		if !found {
			s = &sealed{key: key, ready: make(chan struct{})}
			c.entries[key] = s
		}
		s.users++
		if c.idle == s {
			c.idle = nil
		}
		c.mu.Unlock()
		if !found { // this caller makes it, the others wait
			s.file, s.err = seal(ctx, from, key.size)
			if s.err != nil {
				c.forget(s)
			}
			close(s.ready)
			return s, c.failed(s)
		}
		select {
		case <-s.ready:
		case <-ctx.Done():
			c.release(s)
			return nil, context.Cause(ctx)
		}
		if s.err == nil {
			return s, nil
		}
		if err := c.failed(s); ctx.Err() != nil || !errors.Is(err, context.Canceled) && !errors.Is(err, context.DeadlineExceeded) {
			return nil, err
		} // its maker was cancelled, this caller is not
	}
}

// failed gives back a copy that could not be made.
func (c *sealedCache) failed(s *sealed) error {
	if s.err == nil {
		return nil
	}
	c.release(s)
	return fmt.Errorf("seal memory of template: %w", s.err)
}

func (c *sealedCache) forget(s *sealed) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.entries, s.key)
}

// release ends one use. The copy is kept until another becomes idle: an emptied pool is likely to be filled again.
func (c *sealedCache) release(s *sealed) {
	c.mu.Lock()
	defer c.mu.Unlock()
	s.users--
	if s.users > 0 || c.entries[s.key] != s {
		return
	}
	if c.idle != nil {
		c.idle.drop(c)
	}
	c.idle = s
}

// drop needs c.mu.
func (s *sealed) drop(c *sealedCache) {
	delete(c.entries, s.key)
	_ = s.file.Close()
}

// close drops all copies. Clones keep what they have mapped.
func (c *sealedCache) close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	var errs []error
	for _, s := range c.entries {
		if s.users > 0 {
			errs = append(errs, fmt.Errorf("memory of template %s is in use", s.key.path))
			continue
		}
		s.drop(c)
	}
	c.idle = nil
	return errors.Join(errs...)
}

func keyOf(f *os.File) (sealedKey, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return sealedKey{}, fmt.Errorf("stat %s: %w", f.Name(), err)
	}
	return sealedKey{f.Name(), st.Dev, st.Ino, st.Size, time.Unix(st.Mtim.Unix())}, nil
}

// sealStep is how much is copied between two looks at ctx, in bytes.
const sealStep = 32 << 20

// seal copies size bytes into a file in memory that nobody can change any more.
func seal(ctx context.Context, from *os.File, size int64) (*os.File, error) {
	fd, err := unix.MemfdCreate("ephemeral-template", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING|unix.MFD_NOEXEC_SEAL)
	if errors.Is(err, unix.EINVAL) { // before Linux 6.3
		fd, err = unix.MemfdCreate("ephemeral-template", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	}
	if err != nil {
		return nil, fmt.Errorf("memfd: %w", err)
	}
	to := os.NewFile(uintptr(fd), "sealed template memory")
	if err := fill(ctx, to, from, size); err != nil {
		_ = to.Close()
		return nil, err
	}
	const seals = unix.F_SEAL_SEAL | unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_WRITE
	if _, err := unix.FcntlInt(to.Fd(), unix.F_ADD_SEALS, seals); err != nil {
		_ = to.Close()
		return nil, fmt.Errorf("seal: %w", err)
	}
	return to, nil
}

// fill copies everything, holes too: a clone that writes to a hole would make the kernel allocate the page twice.
func fill(ctx context.Context, to, from *os.File, size int64) error {
	for done := int64(0); done < size; {
		if err := ctx.Err(); err != nil {
			return context.Cause(ctx)
		}
		n, err := unix.Sendfile(int(to.Fd()), int(from.Fd()), &done, int(min(sealStep, size-done)))
		if err != nil && !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("copy: %w", err)
		}
		if err == nil && n == 0 {
			return fmt.Errorf("copy: the file ends at %d of %d bytes", done, size)
		}
	}
	return nil
}
