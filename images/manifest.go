package images

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"
)

// The files of an image directory.
const (
	kernelFile    = "vmlinuz"
	initramfsFile = "initramfs"
	rootfsFile    = "rootfs.erofs"
	manifestFile  = "manifest.json"
)

// manifestVersion changes when a manifest of before can no longer be read.
const manifestVersion = 1

// maxManifest bounds what is read of a manifest file, in bytes.
const maxManifest = 4 << 20

var imageFiles = []string{kernelFile, initramfsFile, rootfsFile}

// What callers decide on with errors.Is.
var (
	// ErrNotBuilt: there is no image in the directory.
	ErrNotBuilt = errors.New("image not built")
	// ErrDamaged: the image's files are not those its manifest names.
	ErrDamaged = errors.New("image damaged")
	// ErrNoSpace: the file system is full, or too small for a build.
	ErrNoSpace = errors.New("not enough disk space")
)

// Manifest says what an image consists of and what it was built from.
type Manifest struct {
	Version  int             `json:"version"`
	Name     string          `json:"name"`
	Digest   string          `json:"digest"` // "sha256:..." over the files' digests
	BuiltAt  time.Time       `json:"built_at"`
	Inputs   string          `json:"inputs"` // "sha256:..." over all that root filesystem, kernel and modules are made from
	Recipe   Recipe          `json:"recipe"`
	Kernel   string          `json:"kernel_version"` // as uname -r prints it in the machine
	Files    map[string]File `json:"files"`
	Modules  []string        `json:"modules"`  // kernel modules of the initramfs, in load order
	Packages []Package       `json:"packages"` // Debian packages of the root filesystem and the kernel's, by name
}

// File is one file of an image.
type File struct {
	SHA256 string `json:"sha256"` // hexadecimal
	Size   int64  `json:"size"`   // bytes
}

// Package is an installed Debian package.
type Package struct {
	Name    string `json:"name"`
	Version string `json:"version"`
}

var (
	nameRE   = regexp.MustCompile(`^[a-z0-9][a-z0-9-]{0,62}$`)
	digestRE = regexp.MustCompile(`^[0-9a-f]{64}$`)
)

// ValidName reports whether s can name an image: 1 to 63 of a-z, 0-9 and "-", not starting with "-".
func ValidName(s string) bool { return nameRE.MatchString(s) }

// digest computes the image's digest from the digests of its files.
func (m *Manifest) digest() string {
	h := sha256.New()
	for _, name := range imageFiles {
		fmt.Fprintf(h, "%s  %s\n", m.Files[name].SHA256, name)
	}
	return "sha256:" + hex.EncodeToString(h.Sum(nil))
}

// check refuses a manifest that does not fit itself.
func (m *Manifest) check() error {
	if m.Version != manifestVersion {
		return fmt.Errorf("manifest version %d, want %d", m.Version, manifestVersion)
	}
	if !ValidName(m.Name) {
		return fmt.Errorf("manifest has no valid image name")
	}
	for _, name := range imageFiles {
		f, ok := m.Files[name]
		if !ok || !digestRE.MatchString(f.SHA256) || f.Size <= 0 {
			return fmt.Errorf("manifest has no size and digest of %s", name)
		}
	}
	if m.Digest != m.digest() {
		return fmt.Errorf("manifest digest does not fit its files")
	}
	return nil
}

// image is the manifest's image with its files in dir.
func (m *Manifest) image(dir string) Image {
	return Image{
		Name:      m.Name,
		Digest:    m.Digest,
		Kernel:    filepath.Join(dir, kernelFile),
		Initramfs: filepath.Join(dir, initramfsFile),
		RootFS:    filepath.Join(dir, rootfsFile),
		BuiltAt:   m.BuiltAt,

		LeastMemoryMiB: m.Recipe.MemoryMiB,
	}
}

// ReadManifest reads the manifest of the image in dir without looking at the image's files.
func ReadManifest(dir string) (Manifest, error) {
	path := filepath.Join(dir, manifestFile)
	f, err := os.Open(path)
	if errors.Is(err, os.ErrNotExist) {
		return Manifest{}, fmt.Errorf("%w: no %s; build it with `ephemeral image build`", ErrNotBuilt, path)
	}
	if err != nil {
		return Manifest{}, fmt.Errorf("read image manifest: %w", err)
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxManifest+1))
	if err != nil {
		return Manifest{}, fmt.Errorf("read image manifest %s: %w", path, err)
	}
	return parseManifest(path, b)
}

func parseManifest(path string, b []byte) (Manifest, error) {
	var m Manifest
	if len(b) > maxManifest {
		return m, damaged(path, errors.New("larger than 4 MiB"))
	}
	if err := json.Unmarshal(b, &m); err != nil {
		return Manifest{}, damaged(path, err)
	}
	if err := m.check(); err != nil {
		return Manifest{}, damaged(path, err)
	}
	return m, nil
}

// damaged says what is wrong with a file of an image, and how to repair it.
func damaged(path string, why error) error {
	return fmt.Errorf("%w: %s: %w; rebuild it with `ephemeral image build --rebuild`", ErrDamaged, path, why)
}

// write puts the manifest into dir and waits until it is on disk.
func (m *Manifest) write(dir string) error {
	b, err := json.MarshalIndent(m, "", "  ")
	if err != nil {
		return fmt.Errorf("encode image manifest: %w", err)
	}
	return writeFile(filepath.Join(dir, manifestFile), append(b, '\n'))
}

// writeFile writes a new read-only file and waits until it is on disk.
func writeFile(path string, b []byte) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o444)
	if err != nil {
		return fmt.Errorf("create %s: %w", path, noSpace(err))
	}
	_, err = f.Write(b)
	if err == nil {
		err = f.Sync()
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return fmt.Errorf("write %s: %w", path, noSpace(err))
	}
	return nil
}

// sumFile returns the size and digest of a file.
func sumFile(path string) (File, error) {
	f, err := os.Open(path)
	if err != nil {
		return File{}, err
	}
	defer f.Close()
	h := sha256.New()
	n, err := io.Copy(h, f)
	if err != nil {
		return File{}, fmt.Errorf("read %s: %w", path, err)
	}
	return File{SHA256: hex.EncodeToString(h.Sum(nil)), Size: n}, nil
}

// parsePackages reads a list of packages, name and version a line, and sorts it.
func parsePackages(b []byte) ([]Package, error) {
	var out []Package
	for line := range strings.Lines(string(b)) {
		fields := strings.Fields(line)
		if len(fields) != 2 {
			return nil, fmt.Errorf("list of packages has the line %q", line)
		}
		out = append(out, Package{Name: fields[0], Version: fields[1]})
	}
	slices.SortFunc(out, func(a, b Package) int { return strings.Compare(a.Name, b.Name) })
	return out, nil
}
