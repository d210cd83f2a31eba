package images

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

// verifiedFile remembers which files were found to have the manifest's digests, so that a start need not read them again.
const verifiedFile = "verified.json"

// settled is how old a file's last change must be before its verification is remembered: times in a file system are
// coarse, and a change right after the reading must not go unnoticed.
const settled = 100 * time.Millisecond

// identity tells whether a file is still the one that was read. Any change to its content changes Changed, which no program
// can set: inode(7), st_ctime.
type identity struct {
	Device, Inode uint64
	Size          int64
	Changed       int64 // nanoseconds
	SHA256        string
}

func identify(path string) (identity, error) {
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		return identity{}, &os.PathError{Op: "lstat", Path: path, Err: err}
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return identity{}, fmt.Errorf("%s is not a regular file", path)
	}
	return identity{Device: st.Dev, Inode: st.Ino, Size: st.Size, Changed: st.Ctim.Nano()}, nil
}

// Open returns the image in dir once its files are known to have the manifest's digests. Files that did not change since
// they were verified are not read again; Verify reads them in any case. Errors: ErrNotBuilt, ErrDamaged.
func Open(dir string) (Image, error) {
	return open(dir, true)
}

// Verify is Open, reading every file.
func Verify(dir string) (Image, error) {
	return open(dir, false)
}

func open(dir string, remembered bool) (Image, error) {
	abs, err := resolve(dir)
	if err != nil {
		return Image{}, err
	}
	m, err := ReadManifest(abs)
	if err != nil {
		return Image{}, err
	}
	known := map[string]identity{}
	if remembered {
		known = readVerified(abs)
	}
	seen := make(map[string]identity, len(imageFiles))
	fresh := false
	for _, name := range imageFiles {
		id, read, err := verifyFile(filepath.Join(abs, name), m.Files[name], known[name])
		if err != nil {
			return Image{}, err
		}
		fresh = fresh || read
		if time.Since(time.Unix(0, id.Changed)) > settled {
			seen[name] = id
		}
	}
	if fresh {
		writeVerified(abs, seen)
	}
	return m.image(abs), nil
}

// resolve is the directory of the build that an image's directory means now. A build replaces the link, never what it points to:
// what is opened stays what was verified. ErrNotBuilt.
func resolve(dir string) (string, error) {
	abs, err := filepath.Abs(dir)
	if err == nil {
		abs, err = filepath.EvalSymlinks(abs)
	}
	if errors.Is(err, os.ErrNotExist) {
		return "", fmt.Errorf("%w: no %s; build it with `ephemeral image build`", ErrNotBuilt, dir)
	}
	if err != nil {
		return "", fmt.Errorf("find image directory %s: %w", dir, err)
	}
	return abs, nil
}

// verifyFile compares a file with what the manifest says of it. It reports whether it had to read it.
func verifyFile(path string, want File, known identity) (identity, bool, error) {
	id, err := identify(path)
	if err != nil {
		return identity{}, false, damaged(path, err)
	}
	if id.Size != want.Size {
		return identity{}, false, damaged(path, fmt.Errorf("%d bytes, want %d", id.Size, want.Size))
	}
	id.SHA256 = want.SHA256
	if id == known {
		return id, false, nil
	}
	got, err := sumFile(path)
	if err != nil {
		return identity{}, false, fmt.Errorf("verify image: %w", err)
	}
	if got != want {
		return identity{}, false, damaged(path, fmt.Errorf("SHA-256 is %s, want %s", got.SHA256, want.SHA256))
	}
	return id, true, nil
}

// readVerified returns what is remembered; nothing when it cannot be read, for then everything is verified again.
func readVerified(dir string) map[string]identity {
	b, err := os.ReadFile(filepath.Join(dir, verifiedFile))
	if err != nil || len(b) > 1<<16 {
		return nil
	}
	var known map[string]identity
	if json.Unmarshal(b, &known) != nil {
		return nil
	}
	return known
}

// writeVerified remembers. Where the directory cannot be written the next start verifies again.
func writeVerified(dir string, seen map[string]identity) {
	b, err := json.Marshal(seen)
	if err != nil {
		return
	}
	tmp, err := os.CreateTemp(dir, "."+verifiedFile+"-*")
	if err != nil {
		return
	}
	_, err = tmp.Write(b)
	if cerr := tmp.Close(); err == nil {
		err = cerr
	}
	if err != nil || os.Rename(tmp.Name(), filepath.Join(dir, verifiedFile)) != nil {
		os.Remove(tmp.Name())
	}
}

// List returns the names of the images in a directory of images, sorted.
func List(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list images: %w", err)
	}
	var names []string
	for _, e := range entries {
		if !ValidName(e.Name()) {
			continue
		}
		if _, err := os.Stat(filepath.Join(dir, e.Name(), manifestFile)); err == nil {
			names = append(names, e.Name())
		}
	}
	slices.Sort(names)
	return names, nil
}

// Digests are those of the images in a directory of images.
func Digests(dir string) (map[string]bool, error) {
	names, err := List(dir)
	if err != nil {
		return nil, err
	}
	all := make(map[string]bool, len(names))
	for _, name := range names {
		m, err := ReadManifest(filepath.Join(dir, name))
		if err != nil && !errors.Is(err, ErrDamaged) && !errors.Is(err, ErrNotBuilt) {
			return nil, err
		}
		all[m.Digest] = true
	}
	return all, nil
}
