package files

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// place is a directory that the user 1000 may write, beside one of root's.
func place(t *testing.T) (dir string, u User) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Fatal("run as root")
	}
	dir, err := os.MkdirTemp("/tmp", "files-*")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	for name, mode := range map[string]os.FileMode{"": 0o755, "his": 0o755, "roots": 0o700, "shared": 0o770} {
		path := filepath.Join(dir, name)
		if err := errors.Join(os.MkdirAll(path, mode), os.Chmod(path, mode)); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(
		os.Chown(filepath.Join(dir, "his"), 1000, 1000), os.Chown(filepath.Join(dir, "shared"), 0, 2000),
		os.WriteFile(filepath.Join(dir, "roots/secret"), []byte("secret"), 0o600),
		os.WriteFile(filepath.Join(dir, "public"), []byte("public"), 0o644),
		os.Symlink("../roots/secret", filepath.Join(dir, "his/link")),
		os.Symlink("../public", filepath.Join(dir, "his/good")),
		unix.Mkfifo(filepath.Join(dir, "his/pipe"), 0o666), os.Chmod(filepath.Join(dir, "his/pipe"), 0o666),
	); err != nil {
		t.Fatal(err)
	}
	return dir, User{UID: 1000, GID: 1000, Groups: []uint32{2000}}
}

func TestUserReads(t *testing.T) {
	dir, u := place(t)
	for path, want := range map[string]error{
		"public": nil, "his/good": nil, "roots/secret": unix.EACCES, "his/link": unix.EACCES, "none": unix.ENOENT,
		"his": ErrNotRegular, "his/pipe": ErrNotRegular, "/dev/zero": ErrNotRegular, "/proc/version": ErrKernelFile,
		"/proc/self/mem": ErrKernelFile, "/proc/self/root/etc/passwd": unix.ELOOP, "/sys/kernel/profiling": ErrKernelFile,
	} {
		full := path
		if !filepath.IsAbs(full) {
			full = filepath.Join(dir, path)
		}
		data, size, err := u.Read(full, 0, 100)
		if !errors.Is(err, want) || want == nil && err != nil {
			if _, missing := os.Stat(full); want == ErrKernelFile && (missing != nil || errors.Is(err, unix.EACCES)) {
				continue // not on this kernel, or refused by it already
			}
			t.Errorf("%s: %v, want %v", path, err, want)
		}
		if want == nil && (string(data) != "public" || size != 6) {
			t.Errorf("%s: %q of %d", path, data, size)
		}
	}
	if data, size, err := u.Read(filepath.Join(dir, "public"), 2, 3); string(data) != "bli" || size != 6 || err != nil {
		t.Errorf("%q, %d, %v", data, size, err)
	}
	if data, _, err := u.Read(filepath.Join(dir, "public"), 100, 3); len(data) != 0 || err != nil {
		t.Errorf("behind the end: %q, %v", data, err)
	}
}

func TestUserWrites(t *testing.T) {
	dir, u := place(t)
	for path, want := range map[string]error{
		"his/new": nil, "his/a/b/c": nil, "shared/x": nil, "new": unix.EACCES, "public": unix.EACCES, "roots/x": unix.EACCES,
		"his/link": unix.EACCES, "his": unix.EISDIR, "his/pipe": unix.ENXIO, "public/x": unix.ENOTDIR,
		"/proc/self/oom_score_adj": ErrKernelFile, "/proc/self/mem": ErrKernelFile, "/dev/null": ErrNotRegular,
	} {
		full := path
		if !filepath.IsAbs(full) {
			full = filepath.Join(dir, path)
		}
		err := u.Write(full, []byte("text"), false)
		if want == nil {
			var s unix.Stat_t
			if err != nil || unix.Stat(full, &s) != nil || s.Uid != 1000 || s.Gid != 1000 || s.Mode&0o777 != 0o644 || s.Size != 4 {
				t.Errorf("%s: %v, %+v", path, err, s)
			}
			continue
		}
		if !errors.Is(err, want) && !(strings.HasPrefix(path, "/proc") && errors.Is(err, unix.EACCES)) {
			t.Errorf("%s: %v, want %v", path, err, want)
		}
	}
	path := filepath.Join(dir, "his/new")
	if err := errors.Join(os.Chmod(path, 0o755), u.Write(path, []byte(" more"), true)); err != nil {
		t.Fatal(err)
	}
	if b, _ := os.ReadFile(path); string(b) != "text more" {
		t.Errorf("%q", b)
	}
	if err := u.Write(path, nil, false); err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(path); err != nil || info.Size() != 0 || info.Mode() != 0o755 {
		t.Errorf("%+v, %v", info, err)
	}
	if b, err := os.ReadFile(filepath.Join(dir, "roots/secret")); string(b) != "secret" || err != nil {
		t.Errorf("%q, %v", b, err)
	}
}

// TestUserIsOneThread: the process keeps its own rights.
func TestUserIsOneThread(t *testing.T) {
	dir, u := place(t)
	for range 50 {
		if _, _, err := u.Read(filepath.Join(dir, "roots/secret"), 0, 1); !errors.Is(err, unix.EACCES) {
			t.Fatal(err)
		}
		if _, err := os.ReadFile(filepath.Join(dir, "roots/secret")); err != nil {
			t.Fatal(err)
		}
	}
}
