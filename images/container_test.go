package images

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"github.com/google/go-containerregistry/pkg/name"
)

// entry is one of a layer.
type entry struct {
	tar.Header
	data string
}

func file(name, data string) entry {
	return entry{tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o755, Size: int64(len(data))}, data}
}

func special(name string, typ byte, link string) entry {
	return entry{tar.Header{Name: name, Typeflag: typ, Mode: 0o755, Linkname: link}, ""}
}

func archive(t testing.TB, entries ...entry) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, e := range entries {
		must(t, w.WriteHeader(&e.Header))
		_, err := io.WriteString(w, e.data)
		must(t, err)
	}
	must(t, w.Close())
	return b.Bytes()
}

// containerOf is an image for linux/amd64 with the layers.
func containerOf(t testing.TB, layers ...[]entry) v1.Image {
	t.Helper()
	img := v1.Image(empty.Image)
	for _, l := range layers {
		b := archive(t, l...)
		layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(b)), nil })
		must(t, err)
		img, err = mutate.AppendLayers(img, layer)
		must(t, err)
	}
	c, err := img.ConfigFile()
	must(t, err)
	c = c.DeepCopy()
	c.OS, c.Architecture = "linux", "amd64"
	img, err = mutate.ConfigFile(img, c)
	must(t, err)
	return img
}

// layoutOf writes an OCI layout.
func layoutOf(t testing.TB, images ...v1.Image) string {
	t.Helper()
	dir := t.TempDir()
	p, err := layout.Write(dir, empty.Index)
	must(t, err)
	for _, img := range images {
		must(t, p.AppendImage(img, layout.WithPlatform(amd64)))
	}
	return dir
}

func flattened(t testing.TB, layers ...[]entry) (string, error) {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "tree")
	must(t, os.Mkdir(dir, 0o755))
	img, err := openContainer(layoutOf(t, containerOf(t, layers...)))
	if err != nil {
		return dir, err
	}
	return dir, flatten(t.Context(), img, dir, func(string) {})
}

func TestFlatten(t *testing.T) {
	dir, err := flattened(t,
		[]entry{special("usr/", tar.TypeDir, ""), file("usr/bin/sh", "shell"), special("bin", tar.TypeSymlink, "usr/bin"), file("gone", "x"),
			file("opaque/a", "a"), file("opaque/sub/b", "b"), file("replaced/by/file", "x"), file("became/dir", "x"), file("twice", "first"),
			special("dev/null", tar.TypeChar, ""), {tar.Header{Name: "own", Typeflag: tar.TypeReg, Mode: 0o4711, Uid: 33, Gid: 44}, ""}},
		[]entry{file(".wh.gone", ""), file("opaque/.wh..wh..opq", ""), file("opaque/c", "c"), special("hard", tar.TypeLink, "usr/bin/sh"),
			file("bin/extra", "extra"), {tar.Header{Name: "replaced", Typeflag: tar.TypeReg, Size: 1, Mode: 0o600}, "f"}, file("twice", "second"),
			file("/absolute/name", "n"), file("kept", "kept"), file(".wh.never", "")},
		[]entry{file("gone", "again"), file(".wh.gone", "")}, // a whiteout means the layers below only
	)
	must(t, err)
	for name, want := range map[string]string{
		"usr/bin/sh": "shell", "hard": "shell", "opaque/c": "c", "usr/bin/extra": "extra", "replaced": "f", "twice": "second", "absolute/name": "n",
		"kept": "kept", "gone": "again", "became/dir": "x",
	} {
		if b, err := os.ReadFile(filepath.Join(dir, name)); err != nil || string(b) != want {
			t.Errorf("%s: %q, %v, want %q", name, b, err, want)
		}
	}
	for _, name := range []string{"opaque/a", "opaque/sub", "dev/null", ".wh.gone", "opaque/.wh..wh..opq"} {
		if _, err := os.Lstat(filepath.Join(dir, name)); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s is there: %v", name, err)
		}
	}
	fi, err := os.Lstat(filepath.Join(dir, "own"))
	must(t, err)
	if fi.Mode() != 0o711|fs.ModeSetuid {
		t.Errorf("mode %v", fi.Mode())
	}
}

// No layer reaches anything outside of its tree.
func TestFlattenStaysInside(t *testing.T) {
	outside := t.TempDir()
	put(t, filepath.Join(outside, "file"), []byte("precious"))
	up := strings.Repeat("../", 12) + strings.TrimPrefix(outside, "/")
	for name, layers := range map[string][][]entry{
		"dots":                      {{file("../evil", "x")}},
		"dots inside":               {{file("a/../../evil", "x")}},
		"through an absolute link":  {{special("link", tar.TypeSymlink, outside), file("link/evil", "x")}},
		"through a relative link":   {{special("link", tar.TypeSymlink, up), file("link/evil", "x")}},
		"link of a layer below":     {{special("link", tar.TypeSymlink, outside)}, {file("link/evil", "x")}},
		"whiteout through a link":   {{special("link", tar.TypeSymlink, outside)}, {file("link/.wh.file", "")}},
		"opaque through a link":     {{special("link", tar.TypeSymlink, outside)}, {file("link/.wh..wh..opq", "")}},
		"hard link outside":         {{special("hard", tar.TypeLink, up+"/file")}},
		"hard link through a link":  {{special("link", tar.TypeSymlink, outside), special("hard", tar.TypeLink, "link/file")}},
		"whiteout of the directory": {{file(".wh...", "")}},
		"whiteout of nothing":       {{file("a/.wh.", "")}},
	} {
		t.Run(name, func(t *testing.T) {
			dir, err := flattened(t, layers...)
			if err == nil {
				t.Error("it is accepted")
			}
			if _, err := os.Lstat(filepath.Join(dir, "..", "evil")); !errors.Is(err, fs.ErrNotExist) {
				t.Error("a file was made outside")
			}
			all, err := os.ReadDir(outside)
			if err != nil || len(all) != 1 || get(t, filepath.Join(outside, "file")) != "precious" {
				t.Errorf("outside: %v, %v", all, err)
			}
		})
	}
	// A link that leads outside and that nothing is written through is as good as any.
	dir, err := flattened(t, []entry{special("var/run", tar.TypeSymlink, "/run")}, []entry{file("var/run", "replaced")})
	if err != nil || get(t, filepath.Join(dir, "var/run")) != "replaced" {
		t.Errorf("an absolute link replaced: %v", err)
	}
}

func TestContainerRefused(t *testing.T) {
	good := containerOf(t, []entry{file("bin/sh", "x")})
	arm, err := good.ConfigFile()
	must(t, err)
	arm = arm.DeepCopy()
	arm.Architecture = "arm64"
	foreign, err := mutate.ConfigFile(good, arm)
	must(t, err)
	for name, c := range map[string]struct {
		path func(t *testing.T) string
		want string
	}{
		"nothing there": {func(*testing.T) string { return "/nonexistent" }, "no such file"},
		"no layout":     {func(t *testing.T) string { return t.TempDir() }, "index.json"},
		"no archive": {func(t *testing.T) string {
			p := filepath.Join(t.TempDir(), "x")
			put(t, p, []byte("not a tar"))
			return p
		}, ""},
		"two images":           {func(t *testing.T) string { return layoutOf(t, good, containerOf(t, []entry{file("b", "")})) }, "holds 2 images"},
		"no image":             {func(t *testing.T) string { return layoutOf(t) }, "holds 0 images"},
		"another architecture": {func(t *testing.T) string { return layoutOf(t, foreign) }, "arm64"},
		"no layers":            {func(t *testing.T) string { return layoutOf(t, containerOf(t)) }, "0 layers"},
		"another configuration": {func(t *testing.T) string {
			dir := layoutOf(t, good)
			h, err := good.ConfigName()
			must(t, err)
			p := filepath.Join(dir, "blobs", "sha256", h.Hex)
			b := bytes.Replace([]byte(get(t, p)), []byte("amd64"), []byte("AMD64"), 1)
			must(t, os.WriteFile(p, b, 0o644))
			return dir
		}, "configuration"},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := openContainer(c.path(t)); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%v, want %q", err, c.want)
			}
		})
	}
}

// A layer that is not the one that the configuration names is refused.
func TestTamperedLayer(t *testing.T) {
	img := containerOf(t, []entry{file("bin/sh", strings.Repeat("shell", 1000))})
	dir := layoutOf(t, img)
	other := containerOf(t, []entry{file("bin/sh", strings.Repeat("SHELL", 1000))})
	digests := func(img v1.Image) (string, v1.Layer) {
		layers, err := img.Layers()
		must(t, err)
		h, err := layers[0].Digest()
		must(t, err)
		return h.Hex, layers[0]
	}
	hex, _ := digests(img)
	_, layer := digests(other)
	r, err := layer.Compressed()
	must(t, err)
	b, err := io.ReadAll(r)
	must(t, err)
	must(t, os.WriteFile(filepath.Join(dir, "blobs", "sha256", hex), b, 0o644))
	opened, err := openContainer(dir)
	must(t, err)
	tree := t.TempDir()
	if err := flatten(t.Context(), opened, tree, func(string) {}); !errors.Is(err, ErrLayer) || !strings.Contains(err.Error(), "SHA-256") {
		t.Errorf("%v, want a layer refused for its digest", err)
	}
	if got, _ := os.ReadDir(tree); len(got) != 0 {
		t.Errorf("%v was unpacked", got)
	}
}

func TestFlattenIsBounded(t *testing.T) {
	huge := &tree{bytes: maxLayerBytes - 600} // room for one header, not for its data
	err := huge.each(t.Context(), bytes.NewReader(archive(t, file("a", strings.Repeat("x", 4096)))), func(_ string, _ *tar.Header, r io.Reader) error {
		_, err := io.Copy(io.Discard, r)
		return err
	})
	if err == nil {
		t.Error("too many bytes are accepted")
	}
	many := &tree{entries: maxLayerEntries}
	if err := many.each(t.Context(), bytes.NewReader(archive(t, file("a", ""))), nil); !errors.Is(err, ErrLayer) || !strings.Contains(err.Error(), "entries") {
		t.Errorf("too many entries: %v", err)
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(errors.New("stopped"))
	if err := new(tree).each(ctx, bytes.NewReader(archive(t, file("a", ""))), nil); err == nil || err.Error() != "stopped" {
		t.Errorf("cancelled: %v", err)
	}
}

// rootfsOf is a container image that machines can be made of; extra is added to it.
func rootfsOf(t testing.TB, extra ...entry) v1.Image {
	return containerOf(t, append([]entry{file("bin/sh", "#!"), file("bin/true", "#!"),
		file("etc/passwd", "root:x:0:0::/root:/bin/sh\nnode:x:1000:1000::/home/node:/bin/sh\n"), file("etc/resolv.conf", "nameserver 192.0.2.1\n"),
		special("etc/hosts", tar.TypeSymlink, "/nowhere")}, extra...))
}

func TestPrepareTree(t *testing.T) {
	dir := t.TempDir()
	must(t, flatten(t.Context(), rootfsOf(t, file("dev/console", "x")), dir, func(string) {}))
	must(t, prepareTree(dir))
	if got := get(t, filepath.Join(dir, "etc/passwd")); got != "root:x:0:0::/root:/bin/sh\nworker:x:1000:1000::/home/worker:/bin/sh\n" {
		t.Errorf("passwd %q", got)
	}
	if get(t, filepath.Join(dir, "etc/resolv.conf")) != "" || get(t, filepath.Join(dir, "etc/hosts")) != "127.0.0.1\tlocalhost\n" || get(t, filepath.Join(dir, "etc/group")) != "worker:x:1000:\n" {
		t.Error("files of /etc are not as they should be")
	}
	if got := entries(t, filepath.Join(dir, "dev")); len(got) != 0 {
		t.Errorf("/dev holds %v", got)
	}
	if fi, err := os.Stat(filepath.Join(dir, "tmp")); err != nil || fi.Mode().Perm() != 0o777 || fi.Mode()&fs.ModeSticky == 0 {
		t.Errorf("/tmp: %v, %v", fi, err)
	}
	none := t.TempDir()
	if err := prepareTree(none); !errors.Is(err, ErrContainer) || !strings.Contains(err.Error(), "/bin/") {
		t.Errorf("no shell: %v", err)
	}
}

// The whole build of a container image: with kernel and modules of base, the same image twice gives the same digest, from an OCI
// layout as from an archive of docker save.
func TestBuildOfContainer(t *testing.T) {
	b := newBuilding(t)
	base := b.mustBuild(t)
	img := rootfsOf(t)
	saved := filepath.Join(t.TempDir(), "saved.tar")
	ref, err := name.NewTag("example/tools:1")
	must(t, err)
	must(t, tarball.WriteToFile(saved, ref, img))
	build := func(name, from string) Image {
		t.Helper()
		o := b.Options
		o.OCI, o.Recipe = from, Recipe{Name: name}
		got, err := Build(t.Context(), o)
		if err != nil {
			t.Fatalf("%v\n%s", err, b.said)
		}
		return got
	}
	one, two := build("one", layoutOf(t, img)), build("two", saved)
	if one.Digest != two.Digest || one.Digest == base.Digest {
		t.Errorf("digests: %s of the layout, %s of the archive, %s of base", one.Digest, two.Digest, base.Digest)
	}
	if get(t, one.Kernel) != get(t, base.Kernel) {
		t.Error("the kernel is not that of base")
	}
	m, err := ReadManifest(filepath.Dir(one.Kernel))
	if err != nil || !strings.HasPrefix(m.Recipe.OCI, "sha256:") || m.Kernel != "6.12.0-cloud-amd64" || len(m.Modules) != 2 {
		t.Errorf("manifest %+v, %v", m, err)
	}
	if again := build("one", saved); again.Digest != one.Digest || !strings.Contains(b.said.String(), "image one is up to date") {
		t.Errorf("built again: %s\n%s", again.Digest, b.said)
	}
	o := b.Options
	o.OCI = saved
	if _, err := Build(t.Context(), o); err == nil || !strings.Contains(err.Error(), "choose another name") {
		t.Errorf("in place of base: %v", err)
	}
	other := newBuilding(t).Options // without base
	other.OCI, other.Recipe = saved, Recipe{Name: "one"}
	if _, err := Build(t.Context(), other); !errors.Is(err, ErrNotBuilt) || !strings.Contains(err.Error(), "image base") {
		t.Errorf("without base: %v", err)
	}
}

// FuzzLayer: whatever a layer holds, nothing is made or removed outside of the tree.
func FuzzLayer(f *testing.F) {
	f.Add(archive(f, file("a/b", "x"), special("l", tar.TypeSymlink, "../../x"), file("l/evil", "x")))
	f.Add(archive(f, file("a/.wh.b", ""), file("a/.wh..wh..opq", ""), special("h", tar.TypeLink, "/etc/passwd")))
	f.Fuzz(func(t *testing.T, layer []byte) {
		parent := t.TempDir()
		dir := filepath.Join(parent, "tree")
		must(t, os.Mkdir(dir, 0o755))
		put(t, filepath.Join(parent, "beside"), []byte("x"))
		tr, err := openTree(dir)
		must(t, err)
		defer tr.close()
		_ = tr.whiteouts(t.Context(), bytes.NewReader(layer))
		_ = tr.unpack(t.Context(), bytes.NewReader(layer))
		if got := entries(t, parent); len(got) != 2 || get(t, filepath.Join(parent, "beside")) != "x" {
			t.Errorf("beside the tree: %v", got)
		}
	})
}
