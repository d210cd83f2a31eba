package provision

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/ephemeral-run/ephemeral/images"
	"github.com/ephemeral-run/ephemeral/vmm"
)

// templateFormat counts the changes of what a template's directory holds, and of what is done to a guest before its
// template is taken.
const templateFormat = 1

// Files of a template that are not the driver's.
const (
	ramFile      = "ram"
	manifestFile = "manifest.json"
)

// Bounds of what is read back from a template's directory.
const (
	maxManifest = 64 << 10
	maxFiles    = 32
)

// traits are all that a clone must share with its template.
type traits struct {
	Format  int       `json:"format"`
	Image   string    `json:"image"` // digest
	Driver  string    `json:"driver"`
	Version string    `json:"version"`
	CPU     string    `json:"cpu"`
	Shape   vmm.Shape `json:"shape"`
}

// cpuNamer is a driver that knows which CPU its guests see.
type cpuNamer interface{ CPUModel() string }

func traitsOf(d vmm.Driver, image images.Image, shape vmm.Shape) traits {
	t := traits{Format: templateFormat, Image: image.Digest, Driver: d.Name(), Version: d.Version(), Shape: shape}
	if n, ok := d.(cpuNamer); ok {
		t.CPU = n.CPUModel()
	}
	return t
}

// key names a template: a digest of its traits, 32 hexadecimal digits.
func (t traits) key() string {
	b, err := json.Marshal(t)
	if err != nil {
		panic("traits are plain data: " + err.Error())
	}
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:16])
}

// manifest is what a template says of itself.
type manifest struct {
	Traits traits            `json:"traits"`
	MadeAt time.Time         `json:"made_at"`
	RAM    ramInfo           `json:"ram"`
	Files  map[string]digest `json:"files"` // the driver's, by name
}

// ramInfo identifies the memory file without reading all of it: whoever writes to it changes its time.
type ramInfo struct {
	Bytes    int64 `json:"bytes"`
	Modified int64 `json:"modified_unix_nanos"`
}

type digest struct {
	Bytes  int64  `json:"bytes"`
	SHA256 string `json:"sha256"`
}

// describe makes the manifest of a finished template.
func describe(dir string, t traits, madeAt time.Time) (manifest, error) {
	m := manifest{Traits: t, MadeAt: madeAt, Files: map[string]digest{}}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return m, err
	}
	for _, e := range entries {
		switch e.Name() {
		case manifestFile:
		case ramFile:
			if m.RAM, err = describeRAM(filepath.Join(dir, ramFile)); err != nil {
				return m, err
			}
		default:
			if m.Files[e.Name()], err = sum(filepath.Join(dir, e.Name())); err != nil {
				return m, err
			}
		}
	}
	if len(m.Files) == 0 || len(m.Files) > maxFiles {
		return m, fmt.Errorf("the driver left %d files", len(m.Files))
	}
	return m, nil
}

func describeRAM(path string) (ramInfo, error) {
	info, err := os.Lstat(path)
	if err != nil {
		return ramInfo{}, err
	}
	if !info.Mode().IsRegular() || info.Mode().Perm() != ramMode {
		return ramInfo{}, fmt.Errorf("%s has mode %v", path, info.Mode())
	}
	return ramInfo{Bytes: info.Size(), Modified: info.ModTime().UnixNano()}, nil
}

func sum(path string) (digest, error) {
	f, err := os.Open(path)
	if err != nil {
		return digest{}, err
	}
	defer func() { _ = f.Close() }()
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() {
		return digest{}, errors.Join(fmt.Errorf("%s is no regular file", path), err)
	}
	h := sha256.New()
	n, err := io.Copy(h, f)
	if err != nil {
		return digest{}, err
	}
	return digest{Bytes: n, SHA256: hex.EncodeToString(h.Sum(nil))}, nil
}

// verify compares a template's files with its manifest, and that with the wanted traits. fs.ErrNotExist: there is none.
func verify(dir string, want traits) (manifest, error) {
	var m manifest
	f, err := os.Open(filepath.Join(dir, manifestFile))
	if err != nil {
		if _, gone := os.Lstat(dir); gone == nil && errors.Is(err, fs.ErrNotExist) {
			return m, errors.New("there is no manifest")
		}
		return m, err
	}
	defer func() { _ = f.Close() }()
	if err := json.NewDecoder(io.LimitReader(f, maxManifest)).Decode(&m); err != nil {
		return m, fmt.Errorf("read manifest: %w", err)
	}
	if m.Traits != want {
		return m, fmt.Errorf("it is of %+v, wanted is %+v", m.Traits, want)
	}
	if len(m.Files) == 0 || len(m.Files) > maxFiles {
		return m, fmt.Errorf("the manifest names %d files", len(m.Files))
	}
	ram, err := describeRAM(filepath.Join(dir, ramFile))
	if err != nil {
		return m, notMissing(err)
	}
	if ram != m.RAM || ram.Bytes != int64(want.Shape.MemoryMiB)<<20 {
		return m, fmt.Errorf("its memory is %+v, was made as %+v", ram, m.RAM)
	}
	for name, want := range m.Files {
		if !filepath.IsLocal(name) || filepath.Base(name) != name {
			return m, fmt.Errorf("the manifest names a file %.64q", name)
		}
		got, err := sum(filepath.Join(dir, name))
		if err != nil {
			return m, notMissing(err)
		}
		if got != want {
			return m, fmt.Errorf("file %s is %+v, was made as %+v", name, got, want)
		}
	}
	return m, nil
}

// notMissing keeps a damaged template from looking like none.
func notMissing(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%v", err)
	}
	return err
}

// write puts the manifest into the directory and on disk.
func (m manifest) write(dir string) error {
	b, err := json.MarshalIndent(m, "", "  ")
	if err != nil {
		return err
	}
	f, err := os.OpenFile(filepath.Join(dir, manifestFile), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if err != nil {
		return err
	}
	_, err = f.Write(append(b, '\n'))
	return errors.Join(err, f.Sync(), f.Close())
}
