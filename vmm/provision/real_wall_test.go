package provision_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// view looks at the host through the eyes of a VMM.
func (r *real) view(t *testing.T) {
	m, other := r.create(t), r.create(t)
	stats, err := m.Stats()
	if err != nil {
		t.Fatal(err)
	}
	root := fmt.Sprintf("/proc/%d/root", stats.Pid)
	for dir, want := range map[string][]string{
		filepath.Join(r.dir, "machines"): {m.ID()},
		r.dir:                            {"machines"}, // and, with some versions, templates
	} {
		entries, err := os.ReadDir(filepath.Join(root, dir))
		if err != nil {
			t.Fatal(err)
		}
		var names []string
		for _, e := range entries {
			if e.Name() != "templates" {
				names = append(names, e.Name())
			}
		}
		if !slices.Equal(names, want) {
			t.Errorf("in %s a VMM sees %v, want %v", dir, names, want)
		}
	}
	for _, hidden := range []string{filepath.Join(r.dir, "machines", other.ID()), filepath.Join(r.template.Dir, "state"), "/etc/shadow", "/root"} {
		if _, err := os.Stat(filepath.Join(root, hidden)); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("a VMM sees %s (%v)", hidden, err)
		}
	}
	// Beside the jail: what the files themselves allow its user.
	info, err := os.Stat(filepath.Join(r.dir, "machines", m.ID()))
	if err != nil {
		t.Fatal(err)
	}
	uid := info.Sys().(*syscall.Stat_t).Uid
	for path, want := range map[string]uint32{
		filepath.Join(r.dir, "machines", m.ID()):     unix.R_OK | unix.W_OK | unix.X_OK,
		filepath.Join(r.dir, "machines", other.ID()): 0,
		filepath.Join(r.dir, "machines"):             unix.X_OK,
		filepath.Join(r.dir, "templates"):            unix.X_OK,
		r.template.Dir:                               unix.X_OK,
		r.template.RAM:                               unix.R_OK,
		filepath.Join(r.template.Dir, "state"):       0,
		r.template.Image.RootFS:                      unix.R_OK,
	} {
		if got := access(t, path, uid); got != want {
			t.Errorf("user %d may %03b of %s (read, write, search), want %03b", uid, got, path, want)
		}
	}
}

// access is what a user, with its own group only, may do to a file.
func access(t *testing.T, path string, uid uint32) uint32 {
	t.Helper()
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	st := info.Sys().(*syscall.Stat_t)
	switch {
	case st.Uid == uid:
		return st.Mode >> 6 & 7
	case st.Gid == uid:
		return st.Mode >> 3 & 7
	}
	return st.Mode & 7
}

func (r *real) egress(t *testing.T) {
	m := r.create(t)
	const send = `import socket
s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
s.bind(("eth0", 0))
for _ in range(5): s.send(bytes(range(100)))`
	ask(t, m, "python3", "-c", send)
	for _, when := range []string{"before", "after"} {
		packets, octets, err := m.Egress()
		if err != nil || packets < 5 || octets < 500 {
			t.Errorf("%s close: %d packets, %d bytes, %v", when, packets, octets, err)
		}
		if err := m.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if packets, _, err := r.create(t).Egress(); err != nil || packets != 0 {
		t.Errorf("a new machine has sent %d packets, %v", packets, err)
	}
}

// cut ends creations at many moments.
func (r *real) cut(t *testing.T) {
	for after := time.Duration(0); after < 250*time.Millisecond; after += 15 * time.Millisecond {
		ctx, cancel := context.WithTimeout(t.Context(), after)
		m, err := r.p.Create(ctx, r.template)
		cancel()
		if err == nil {
			err = m.Close()
		} else if errors.Is(err, context.DeadlineExceeded) {
			err = nil
		}
		if err != nil {
			t.Errorf("cut after %s: %v", after, err)
		}
		r.clean(t)
	}
}

func (r *real) killed(t *testing.T) {
	m := r.create(t)
	stats, err := m.Stats()
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(stats.Pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	select {
	case <-m.Done():
	case <-time.After(10 * time.Second):
		t.Fatal("the machine is not done")
	}
	if m.Err() == nil {
		t.Error("a machine whose VMM was killed gives no reason")
	}
	if err := m.Close(); err != nil {
		t.Error(err)
	}
	r.clean(t)
}
