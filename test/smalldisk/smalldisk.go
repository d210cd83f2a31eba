// Package smalldisk gives tests a disk that they can fill.
package smalldisk

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// New is a directory of the test with a file system of its own, a tmpfs of the size, as mount(8) reads it ("64m"). Mounting
// takes root.
func New(t testing.TB, size string) string {
	t.Helper()
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size="+size); err != nil {
		t.Fatalf("mount a small disk: %v (the tests run as root)", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Errorf("unmount a small disk: %v", err)
		}
	})
	return dir
}

// Filler is the name of the file that Fill writes.
const Filler = "filler"

// Fill writes the file Filler in the directory until its file system has no space left. It does so only to one smaller than
// 4 GiB.
func Fill(dir string) error {
	f, err := os.Create(filepath.Join(dir, Filler))
	if err != nil {
		return fmt.Errorf("fill a disk: %w", err)
	}
	_, err = io.CopyN(f, zeros{}, 4<<30)
	if !errors.Is(err, unix.ENOSPC) {
		return errors.Join(errors.New("fill a disk: it is not full, at 4 GiB or before another error"), err, f.Close(), os.Remove(f.Name()))
	}
	return f.Close()
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { return len(p), nil }
