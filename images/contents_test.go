package images

import (
	"bytes"
	"crypto/sha256"
	"debug/elf"
	"encoding/hex"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cavaliergopher/cpio"
	"github.com/google/go-cmp/cmp"
	"github.com/ulikunitz/xz"
	"pgregory.net/rapid"
)

// goldenInitramfs is the digest of the archive TestInitramfsGolden writes. It changes when the layout does.
const goldenInitramfs = "e99a3c56b172d063300a92d9a85e05545bba3cc528cb53e74d44f279bbf154c7"

func TestInitramfsGolden(t *testing.T) {
	var b bytes.Buffer
	err := writeInitramfs(&b, []byte("agent"), []module{{"failover.ko", []byte("one")}, {"virtio_net.ko", []byte("three")}})
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	r := cpio.NewReader(bytes.NewReader(b.Bytes()))
	for {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		must(t, err)
		data, err := io.ReadAll(r)
		must(t, err)
		got = append(got, h.Mode.String()+" "+h.Name+" "+string(data))
		if h.Uid != 0 || h.Guid != 0 || !h.ModTime.Equal(fixedTime) {
			t.Errorf("%s: uid %d, gid %d, time %s", h.Name, h.Uid, h.Guid, h.ModTime)
		}
	}
	want := []string{
		"040755 dev ", "040755 proc ", "040755 sys ", "040755 root ", "040755 lib ", "040755 lib/modules ",
		"0100755 init agent",
		"0100644 lib/modules/failover.ko one",
		"0100644 lib/modules/virtio_net.ko three",
		"0100644 lib/modules/order failover.ko\nvirtio_net.ko\n",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if !bytes.HasPrefix(b.Bytes(), []byte("070701")) || b.Len()%4 != 0 {
		t.Errorf("not a newc archive of whole words: %d bytes", b.Len())
	}
	sum := sha256.Sum256(b.Bytes())
	if got := hex.EncodeToString(sum[:]); got != goldenInitramfs {
		t.Errorf("digest %s, want %s", got, goldenInitramfs)
	}
}

// TestInitramfsRoundTrip: what was written is read, whatever the contents.
func TestInitramfsRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		agent := rapid.SliceOfN(rapid.Byte(), 0, 300).Draw(t, "agent")
		names := rapid.SliceOfNDistinct(rapid.StringMatching(`[a-z][a-z0-9_]{0,20}\.ko`), 0, 8, rapid.ID[string]).Draw(t, "names")
		var modules []module
		for _, name := range names {
			modules = append(modules, module{name, rapid.SliceOfN(rapid.Byte(), 0, 100).Draw(t, "data")})
		}
		var b bytes.Buffer
		if err := writeInitramfs(&b, agent, modules); err != nil {
			t.Fatal(err)
		}
		gotAgent, gotModules, err := readInitramfs(&b)
		if err != nil {
			t.Fatal(err)
		}
		same := func(a, b module) bool { return a.Name == b.Name && bytes.Equal(a.Data, b.Data) }
		if !bytes.Equal(gotAgent, agent) || !slices.EqualFunc(gotModules, modules, same) {
			t.Errorf("read %q and %d modules", gotAgent, len(gotModules))
		}
	})
}

// moduleTreeOf writes modules, compressed, below a kernel's directory.
func moduleTreeOf(t *testing.T, builtin string, files map[string][]byte) *moduleTree {
	t.Helper()
	dir := t.TempDir()
	put(t, filepath.Join(dir, "modules.builtin"), []byte(builtin))
	put(t, filepath.Join(dir, "modules.order"), []byte("x"))
	for name, data := range files {
		var b bytes.Buffer
		w, err := xz.NewWriter(&b)
		must(t, err)
		_, err = w.Write(data)
		must(t, err)
		must(t, w.Close())
		put(t, filepath.Join(dir, "kernel", name+".ko.xz"), b.Bytes())
	}
	tree, err := openModuleTree(dir)
	must(t, err)
	return tree
}

func TestModuleOrder(t *testing.T) {
	files := map[string][]byte{
		"net/core/failover":        kernelModule(t, "license=GPL", "depends=", "name=failover"),
		"drivers/net/net_failover": kernelModule(t, "depends=failover"),
		"drivers/net/virtio_net":   kernelModule(t, "depends=net_failover,virtio_ring"),
		"hw_random/virtio-rng":     kernelModule(t, "depends="),
		"fs/erofs":                 kernelModule(t, "depends=libcrc32c"),
		"lib/libcrc32c":            kernelModule(t, "softdep=pre: crc32c-intel crc32c post: later", "depends="),
		"crypto/crc32c-intel":      kernelModule(t, "depends="),
		"later":                    kernelModule(t, "depends="),
	}
	tree := moduleTreeOf(t, "kernel/drivers/virtio/virtio_ring.ko\nkernel/net/packet/af_packet.ko\n", files)
	modules, err := tree.collect([]string{"virtio_net", "af_packet", "virtio_rng", "erofs", "virtio-net"})
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, m := range modules {
		names = append(names, m.Name)
	}
	want := []string{"failover.ko", "net_failover.ko", "virtio_net.ko", "virtio_rng.ko", "crc32c_intel.ko", "libcrc32c.ko", "erofs.ko"}
	if diff := cmp.Diff(want, names); diff != "" {
		t.Error(diff)
	}
	if !bytes.Equal(modules[0].Data, files["net/core/failover"]) {
		t.Error("the module was not decompressed")
	}
}

func TestModuleErrors(t *testing.T) {
	tests := []struct {
		name  string
		files map[string][]byte
		want  string
	}{
		{"missing", nil, "no module a (wanted by the recipe)"},
		{"dependency missing", map[string][]byte{"a": kernelModule(t, "depends=b")}, "no module b (wanted by a)"},
		{"circle", map[string][]byte{"a": kernelModule(t, "depends=b"), "b": kernelModule(t, "depends=a")}, "depend on each other"},
		{"no ELF", map[string][]byte{"a": []byte("text")}, "read dependencies"},
		{"no information", map[string][]byte{"a": executable(t, "")[:64]}, "read dependencies"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, err := moduleTreeOf(t, "", tt.files).collect([]string{"a"})
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("%v, want %q", err, tt.want)
			}
		})
	}
	t.Run("not compressed as named", func(t *testing.T) {
		dir := t.TempDir()
		put(t, filepath.Join(dir, "modules.builtin"), nil)
		put(t, filepath.Join(dir, "a.ko.xz"), kernelModule(t, "depends="))
		tree, err := openModuleTree(dir)
		must(t, err)
		if _, err := tree.collect([]string{"a"}); err == nil || !strings.Contains(err.Error(), "decompress") {
			t.Errorf("%v, want a failed decompression", err)
		}
	})
	t.Run("plain", func(t *testing.T) {
		dir := t.TempDir()
		put(t, filepath.Join(dir, "modules.builtin"), nil)
		put(t, filepath.Join(dir, "a.ko"), kernelModule(t, "depends="))
		tree, err := openModuleTree(dir)
		must(t, err)
		if modules, err := tree.collect([]string{"a"}); err != nil || len(modules) != 1 {
			t.Errorf("%d modules, %v", len(modules), err)
		}
	})
}

func TestPackages(t *testing.T) {
	got, err := parsePackages([]byte("jq 1.7.1\nbash 5.2.37-2+b3\n\n"))
	if err == nil {
		t.Errorf("an empty line passed: %v", got)
	}
	got, err = parsePackages([]byte("jq 1.7.1\nbash 5.2.37-2+b3\n"))
	if err != nil || !slices.Equal(got, []Package{{"bash", "5.2.37-2+b3"}, {"jq", "1.7.1"}}) {
		t.Errorf("%v, %v", got, err)
	}
}

// interpreter makes a program one that needs a dynamic linker.
func interpreter() elf.Prog64 { return elf.Prog64{Type: uint32(elf.PT_INTERP)} }

func FuzzInitramfs(f *testing.F) {
	var b bytes.Buffer
	must(f, writeInitramfs(&b, []byte("agent"), []module{{"a.ko", []byte("one")}}))
	f.Add(b.Bytes())
	f.Fuzz(func(t *testing.T, data []byte) {
		if len(data) > 1<<16 {
			return
		}
		_, modules, err := readInitramfs(bytes.NewReader(data))
		for _, m := range modules {
			if err == nil && m.Name == "" {
				t.Error("a module without a name passed")
			}
		}
	})
}

// TestBuiltImage looks at the image that machines boot from.
func TestBuiltImage(t *testing.T) {
	dir := os.Getenv("EPHEMERAL_TEST_IMAGE")
	if dir == "" {
		dir = filepath.Join("..", "build", "images", "base")
	}
	img, err := Open(dir)
	if err != nil {
		t.Fatalf("%v; run make image", err)
	}
	m, err := ReadManifest(dir)
	must(t, err)
	if !strings.HasPrefix(m.Kernel, "6.12.") || !strings.HasSuffix(m.Kernel, "-cloud-amd64") || m.Recipe.Suite != "trixie" {
		t.Errorf("kernel %s of %s", m.Kernel, m.Recipe.Suite)
	}
	for _, wanted := range Base().Packages {
		if !slices.ContainsFunc(m.Packages, func(p Package) bool { return p.Name == wanted && p.Version != "" }) {
			t.Errorf("no package %s", wanted)
		}
	}
	f, err := os.Open(img.Initramfs)
	must(t, err)
	defer f.Close()
	agent, modules, err := readInitramfs(f)
	must(t, err)
	if !bytes.HasPrefix(agent, []byte(elf.ELFMAG)) {
		t.Error("the initramfs has no agent")
	}
	var names []string
	for _, mod := range modules {
		names = append(names, mod.Name)
		if !bytes.HasPrefix(mod.Data, []byte(elf.ELFMAG)) {
			t.Errorf("module %s is not ELF", mod.Name)
		}
	}
	for _, wanted := range []string{"virtio_blk.ko", "virtio_net.ko", "virtio_rng.ko", "erofs.ko", "overlay.ko", "vmw_vsock_virtio_transport.ko"} {
		if !slices.Contains(names, wanted) {
			t.Errorf("no module %s", wanted)
		}
	}
	if !slices.Equal(names, m.Modules) {
		t.Errorf("manifest lists %v, initramfs %v", m.Modules, names)
	}
}
