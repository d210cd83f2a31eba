package files

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// wide are limits that no test but those of limits reaches.
var wide = Limits{Files: 1000, Bytes: 1 << 20, Path: 512}

// collected makes a scratch directory, has fill put things into its out/, and returns what Collect hands on.
func collected(t *testing.T, l Limits, fill func(out string)) (map[string]string, Left) {
	t.Helper()
	scratch := t.TempDir()
	out := filepath.Join(scratch, Out)
	if err := os.Mkdir(out, 0o755); err != nil {
		t.Fatal(err)
	}
	fill(out)
	d, err := Open(scratch, os.Getuid(), os.Getgid())
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	got := map[string]string{}
	left, err := d.Collect(l, func(path string, mode uint32, content io.Reader) error {
		b, err := io.ReadAll(content)
		got[path] = fmt.Sprintf("%o %s", mode, b)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return got, left
}

func write(t *testing.T, path, content string, mode os.FileMode) {
	t.Helper()
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(content), 0o600), os.Chmod(path, mode)); err != nil {
		t.Fatal(err)
	}
}

func TestCollect(t *testing.T) {
	secret := filepath.Join(t.TempDir(), "secret")
	write(t, secret, "secret", 0o644)
	got, left := collected(t, wide, func(out string) {
		write(t, out+"/empty", "", 0o644)
		write(t, out+"/nul", "\x00", 0o600)
		write(t, out+"/a/b/c", "nested", 0o755)
		write(t, out+"/ü \"n\".txt", "odd", 0o644)
		write(t, out+"/line\nbreak", "odder", 0o000)
		write(t, out+"/\xff", "not UTF-8", 0o644)
		socket, err := net.Listen("unix", out+"/s")
		if err != nil {
			t.Fatal(err)
		}
		socket.(*net.UnixListener).SetUnlinkOnClose(false)
		if err := errors.Join(socket.Close(), os.Symlink(secret, out+"/link"), os.Symlink(filepath.Dir(secret), out+"/links"),
			os.Symlink("empty", out+"/inside"), unix.Mkfifo(out+"/fifo", 0o666),
			unix.Mknod(out+"/device", unix.S_IFCHR|0o666, int(unix.Mkdev(1, 9)))); err != nil {
			t.Fatal(err)
		}
	})
	want := map[string]string{"empty": "644 ", "nul": "600 \x00", "a/b/c": "755 nested", "ü \"n\".txt": "644 odd", "line\nbreak": "0 odder"}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
	if d := cmp.Diff(Left{Skipped: 7}, left); d != "" {
		t.Error(d)
	}
}

// TestCollectReplacedOut has the run put something else in the place of out/.
func TestCollectReplacedOut(t *testing.T) {
	secrets := t.TempDir()
	write(t, secrets+"/secret", "secret", 0o644)
	for name, replace := range map[string]func(out string) error{
		"nothing": func(string) error { return nil },
		"link":    func(out string) error { return os.Symlink(secrets, out) },
		"file":    func(out string) error { return os.WriteFile(out, []byte("x"), 0o644) },
		"fifo":    func(out string) error { return unix.Mkfifo(out, 0o666) },
	} {
		t.Run(name, func(t *testing.T) {
			got, left := collected(t, wide, func(out string) {
				if err := errors.Join(os.Remove(out), replace(out)); err != nil {
					t.Fatal(err)
				}
			})
			if len(got) != 0 || left != (Left{}) {
				t.Errorf("%v, %+v", got, left)
			}
		})
	}
}

func TestCollectLimits(t *testing.T) {
	fill := func(out string) {
		for i := range 50 {
			write(t, fmt.Sprintf("%s/%d", out, i), "0123456789", 0o644)
		}
	}
	got, left := collected(t, Limits{Files: 7, Bytes: 1000, Path: 10}, fill)
	if len(got) != 7 || !left.Truncated {
		t.Errorf("files: %d, %+v", len(got), left)
	}
	got, left = collected(t, Limits{Files: 50, Bytes: 500, Path: 10}, fill)
	if len(got) != 50 || left.Truncated {
		t.Errorf("just within: %d, %+v", len(got), left)
	}
	got, left = collected(t, Limits{Files: 50, Bytes: 99, Path: 10}, fill)
	if len(got) != 9 || !left.Truncated {
		t.Errorf("bytes: %d, %+v", len(got), left)
	}
	got, left = collected(t, Limits{Files: 50, Bytes: 500, Path: 1}, fill)
	if len(got) != 10 || left != (Left{Skipped: 40}) {
		t.Errorf("paths: %d, %+v", len(got), left)
	}
	got, left = collected(t, wide, func(out string) {
		write(t, out+"/"+strings.Repeat("d/", maxDepth)+"f", "", 0o644)
		write(t, out+"/"+strings.Repeat("e/", maxDepth+1)+"f", "", 0o644)
	})
	if len(got) != 1 || left != (Left{Skipped: 1}) {
		t.Errorf("depth: %d, %+v", len(got), left)
	}
}

func TestCollectManyFiles(t *testing.T) {
	got, left := collected(t, wide, func(out string) {
		for i := range 20_000 {
			if err := unix.Mknod(fmt.Sprintf("%s/%d", out, i), unix.S_IFREG|0o644, 0); err != nil {
				t.Fatal(err)
			}
		}
	})
	if len(got) != 1000 || !left.Truncated {
		t.Errorf("%d, %+v", len(got), left)
	}
}

// TestCollectGrowingFile: what is handed on of a file is what it was when it was looked at.
func TestCollectGrowingFile(t *testing.T) {
	scratch := t.TempDir()
	path := filepath.Join(scratch, Out, "f")
	write(t, path, "0123456789", 0o644)
	d, err := Open(scratch, os.Getuid(), os.Getgid())
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	var got bytes.Buffer
	_, err = d.Collect(wide, func(_ string, _ uint32, content io.Reader) error {
		write(t, path, "0123456789abcdef", 0o644)
		_, err := io.Copy(&got, content)
		return err
	})
	if err != nil || got.String() != "0123456789" {
		t.Errorf("%q, %v", got.String(), err)
	}
}
