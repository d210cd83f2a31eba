package images

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// tamper changes one byte of a file in place and sets its times back.
func tamper(t testing.TB, path string) {
	t.Helper()
	fi, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(path, 0o644); err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	b := make([]byte, 1)
	if _, err := f.ReadAt(b, 0); err != nil {
		t.Fatal(err)
	}
	b[0] ^= 1
	if _, err := f.WriteAt(b, 0); err != nil {
		t.Fatal(err)
	}
	if err := os.Chtimes(path, fi.ModTime(), fi.ModTime()); err != nil {
		t.Fatal(err)
	}
}

func TestTamperedFiles(t *testing.T) {
	for _, name := range imageFiles {
		t.Run(name, func(t *testing.T) {
			b := newBuilding(t)
			img := b.mustBuild(t)
			dir := filepath.Dir(img.Kernel)
			// The verification is remembered before the file changes.
			time.Sleep(settled + 50*time.Millisecond)
			for range 2 {
				if _, err := Open(dir); err != nil {
					t.Fatal(err)
				}
			}
			tamper(t, filepath.Join(dir, name))
			for _, open := range []func(string) (Image, error){Open, Verify} {
				_, err := open(dir)
				if !errors.Is(err, ErrDamaged) || !strings.Contains(err.Error(), name) || !strings.Contains(err.Error(), "image build --rebuild") {
					t.Errorf("%v, want damaged %s and the fix", err, name)
				}
			}
		})
	}
}

func TestDamagedFiles(t *testing.T) {
	tests := []struct {
		name   string
		damage func(t *testing.T, dir string)
		want   error
	}{
		{"truncated", func(t *testing.T, dir string) { must(t, os.Truncate(filepath.Join(dir, rootfsFile), 3)) }, ErrDamaged},
		{"missing", func(t *testing.T, dir string) { must(t, os.Remove(filepath.Join(dir, kernelFile))) }, ErrDamaged},
		{"symbolic link", func(t *testing.T, dir string) {
			path := filepath.Join(dir, kernelFile)
			must(t, os.Rename(path, path+".moved"))
			must(t, os.Symlink(path+".moved", path))
		}, ErrDamaged},
		{"no manifest", func(t *testing.T, dir string) { must(t, os.Remove(filepath.Join(dir, manifestFile))) }, ErrNotBuilt},
		{"manifest cut", func(t *testing.T, dir string) { must(t, os.Truncate(filepath.Join(dir, manifestFile), 20)) }, ErrDamaged},
		{"manifest huge", func(t *testing.T, dir string) { must(t, os.Truncate(filepath.Join(dir, manifestFile), maxManifest+1)) }, ErrDamaged},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			b := newBuilding(t)
			dir := filepath.Dir(b.mustBuild(t).Kernel)
			tt.damage(t, dir)
			if _, err := Open(dir); !errors.Is(err, tt.want) || !strings.Contains(err.Error(), "ephemeral image build") {
				t.Errorf("%v, want %v and the fix", err, tt.want)
			}
		})
	}
	if _, err := Open(filepath.Join(t.TempDir(), "none")); !errors.Is(err, ErrNotBuilt) {
		t.Errorf("%v, want not built", err)
	}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// TestTamperedManifest changes one thing at a time in a manifest whose files are whole.
func TestTamperedManifest(t *testing.T) {
	changes := map[string]func(m *Manifest){
		"version":      func(m *Manifest) { m.Version++ },
		"name":         func(m *Manifest) { m.Name = "../../etc" },
		"digest":       func(m *Manifest) { m.Digest = "sha256:" + strings.Repeat("0", 64) },
		"no digest":    func(m *Manifest) { m.Digest = "" },
		"file missing": func(m *Manifest) { delete(m.Files, initramfsFile) },
		"file digest": func(m *Manifest) {
			m.Files[kernelFile] = File{SHA256: strings.Repeat("a", 64), Size: m.Files[kernelFile].Size}
		},
		"file size": func(m *Manifest) { m.Files[kernelFile] = File{SHA256: m.Files[kernelFile].SHA256, Size: 0} },
		"both digests": func(m *Manifest) {
			m.Files[kernelFile] = File{SHA256: strings.Repeat("a", 64), Size: m.Files[kernelFile].Size}
			m.Digest = m.digest()
		},
		"other size": func(m *Manifest) {
			m.Files[rootfsFile] = File{SHA256: m.Files[rootfsFile].SHA256, Size: 1}
		},
	}
	for name, change := range changes {
		t.Run(name, func(t *testing.T) {
			b := newBuilding(t)
			dir := filepath.Dir(b.mustBuild(t).Kernel)
			m, err := ReadManifest(dir)
			must(t, err)
			change(&m)
			text, err := json.Marshal(m)
			must(t, err)
			must(t, os.Remove(filepath.Join(dir, manifestFile)))
			put(t, filepath.Join(dir, manifestFile), text)
			if _, err := Open(dir); !errors.Is(err, ErrDamaged) {
				t.Errorf("%v, want damaged", err)
			}
		})
	}
}

// TestRememberedVerification: a file is read once, again when it was replaced, and always by Verify. What is remembered is
// no proof of another file.
func TestRememberedVerification(t *testing.T) {
	b := newBuilding(t)
	dir := filepath.Dir(b.mustBuild(t).Kernel)
	time.Sleep(settled + 50*time.Millisecond)
	if _, err := Open(dir); err != nil {
		t.Fatal(err)
	}
	m, err := ReadManifest(dir)
	must(t, err)
	known := readVerified(dir)
	if len(known) != len(imageFiles) {
		t.Fatalf("%d files remembered, want %d", len(known), len(imageFiles))
	}
	path := filepath.Join(dir, rootfsFile)
	if _, read, err := verifyFile(path, m.Files[rootfsFile], known[rootfsFile]); err != nil || read {
		t.Errorf("read %t, %v: want the remembered verification", read, err)
	}
	// The same content in another file is read.
	content := get(t, path)
	must(t, os.Remove(path))
	put(t, path, []byte(content))
	if _, read, err := verifyFile(path, m.Files[rootfsFile], known[rootfsFile]); err != nil || !read {
		t.Errorf("read %t, %v: want a reading", read, err)
	}
	// Garbage in the memory is no harm.
	put(t, filepath.Join(dir, verifiedFile), []byte("{"))
	if _, err := Open(dir); err != nil {
		t.Error(err)
	}
}

// TestFreshFilesAreNotRemembered: a file that changed a moment ago may change again without another time.
func TestFreshFilesAreNotRemembered(t *testing.T) {
	b := newBuilding(t)
	dir := filepath.Dir(b.mustBuild(t).Kernel)
	must(t, os.Chmod(filepath.Join(dir, kernelFile), 0o400))
	if _, err := Open(dir); err != nil {
		t.Fatal(err)
	}
	if _, ok := readVerified(dir)[kernelFile]; ok {
		t.Error("a file that changed just now is remembered")
	}
}

func TestValidName(t *testing.T) {
	for name, want := range map[string]bool{
		"base": true, "base-2": true, "0": true, strings.Repeat("a", 63): true,
		"": false, "-a": false, "a/b": false, "..": false, "A": false, "a_b": false, strings.Repeat("a", 64): false, "a\n": false,
	} {
		if got := ValidName(name); got != want {
			t.Errorf("ValidName(%q) = %t", name, got)
		}
	}
}

func FuzzManifest(f *testing.F) {
	b := newBuilding(f)
	dir := filepath.Dir(b.mustBuild(f).Kernel)
	f.Add([]byte(get(f, filepath.Join(dir, manifestFile))))
	f.Add([]byte(`{"version":1,"files":{"vmlinuz":{"size":-1}}}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		m, err := parseManifest("manifest.json", text)
		if err != nil {
			if !errors.Is(err, ErrDamaged) {
				t.Errorf("%v, want damaged", err)
			}
			return
		}
		if !ValidName(m.Name) || m.Digest != m.digest() {
			t.Errorf("%+v passed", m)
		}
	})
}
