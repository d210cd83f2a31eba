package files

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func open(t testing.TB) (*Dir, string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "scratch")
	if err := os.Mkdir(path, 0o755); err != nil {
		t.Fatal(err)
	}
	d, err := Open(path, os.Getuid(), os.Getgid())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = d.Close() })
	return d, path
}

func TestRoundTrip(t *testing.T) {
	d, path := open(t)
	for _, c := range []struct {
		name, content string
		mode, want    os.FileMode
	}{
		{"a", "", 0, 0o644}, {"a", "again", 0o600, 0o600}, {"b/c/d", "\x00\xff", 0o4755, 0o755}, {"b/c/é ", "x", 0o400, 0o400},
	} {
		if n, err := d.Put(c.name, uint32(c.mode), strings.NewReader(c.content)); err != nil || n != int64(len(c.content)) {
			t.Fatalf("%s: %d, %v", c.name, n, err)
		}
		info, err := os.Stat(filepath.Join(path, c.name))
		if err != nil || info.Mode() != c.want {
			t.Errorf("%s: %v, %v", c.name, info, err)
		}
		var got bytes.Buffer
		if err := d.Get(c.name, int64(len(c.content)), &got); err != nil || got.String() != c.content {
			t.Errorf("%s: %q, %v", c.name, got.String(), err)
		}
	}
}

func TestLinksLeadNowhere(t *testing.T) {
	d, path := open(t)
	outside := t.TempDir()
	secret := filepath.Join(outside, "secret")
	if err := errors.Join(
		os.WriteFile(secret, []byte("secret"), 0o600),
		os.Symlink(outside, path+"/dir"),
		os.Symlink(secret, path+"/file"),
		os.Symlink("../../../../../../etc", path+"/up"),
		os.Symlink("/proc/self/root", path+"/magic"),
		os.Mkdir(path+"/real", 0o755),
		os.Symlink("real", path+"/inside"),
		os.Link(secret, path+"/hard"),
		unix.Mkfifo(path+"/fifo", 0o666),
	); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"dir/secret", "file", "up/passwd", "magic/etc/passwd", "inside", "real", "fifo"} {
		if err := d.Get(name, 1<<20, io.Discard); err == nil {
			t.Errorf("read %s", name)
		}
	}
	for _, name := range []string{"dir/new", "up/new", "magic/tmp/new", "inside/new"} {
		if _, err := d.Put(name, 0, strings.NewReader("x")); err == nil {
			t.Errorf("wrote %s", name)
		}
	}
	for _, name := range []string{"file", "hard"} { // replaced, not written through
		if _, err := d.Put(name, 0, strings.NewReader("mine")); err != nil {
			t.Error(err)
		}
	}
	if content, err := os.ReadFile(secret); err != nil || string(content) != "secret" {
		t.Errorf("outside: %q, %v", content, err)
	}
	if entries, err := os.ReadDir(outside); err != nil || len(entries) != 1 {
		t.Errorf("outside: %v, %v", entries, err)
	}
}

func TestGetLimit(t *testing.T) {
	d, _ := open(t)
	if _, err := d.Put("a", 0, strings.NewReader("0123456789")); err != nil {
		t.Fatal(err)
	}
	if err := d.Get("a", 9, io.Discard); !errors.Is(err, ErrTooLarge) {
		t.Errorf("got %v", err)
	}
	if err := d.Get("/proc/version", 9, io.Discard); !errors.Is(err, ErrPath) {
		t.Errorf("got %v", err)
	}
}

func TestFailedPutLeavesNothing(t *testing.T) {
	d, path := open(t)
	broken := errors.New("broken")
	if _, err := d.Put("a", 0, io.MultiReader(strings.NewReader("half"), failing{broken})); !errors.Is(err, broken) {
		t.Errorf("got %v", err)
	}
	if err := os.Mkdir(path+"/taken", 0o755); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Put("taken", 0, strings.NewReader("x")); err == nil {
		t.Error("replaced a directory")
	}
	if entries, err := os.ReadDir(path); err != nil || len(entries) != 1 {
		t.Errorf("left %v, %v", entries, err)
	}
}

type failing struct{ err error }

func (f failing) Read([]byte) (int, error) { return 0, f.err }

// FuzzPut: whatever the path, nothing appears outside of the directory, and what was put can be read.
func FuzzPut(f *testing.F) {
	for _, s := range []string{"a", "a/b", "../a", "/a", "a/../b", "a//b", "./a", "a\x00b", "..", "", strings.Repeat("a/", 40) + "b"} {
		f.Add(s)
	}
	root := f.TempDir()
	f.Fuzz(func(t *testing.T, name string) {
		base, err := os.MkdirTemp(root, "")
		if err != nil {
			t.Fatal(err)
		}
		defer os.RemoveAll(base)
		scratch := filepath.Join(base, "scratch")
		if err := os.Mkdir(scratch, 0o755); err != nil {
			t.Fatal(err)
		}
		d, err := Open(scratch, os.Getuid(), os.Getgid())
		if err != nil {
			t.Fatal(err)
		}
		defer d.Close()
		_, err = d.Put(name, 0, strings.NewReader("content"))
		entries, _ := os.ReadDir(base)
		if len(entries) != 1 {
			t.Fatalf("%q left the directory", name)
		}
		if err != nil {
			return
		}
		if Check(name) != nil {
			t.Fatalf("%q is accepted", name)
		}
		if content, err := os.ReadFile(filepath.Join(scratch, name)); err != nil || string(content) != "content" {
			t.Fatalf("%q: %q, %v", name, content, err)
		}
	})
}
