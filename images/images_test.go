package images

import (
	"bytes"
	"context"
	"debug/elf"
	"encoding/binary"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
)

// executable is the least that passes for a static x86-64 program; tag makes it differ from others.
func executable(t testing.TB, tag string, progs ...elf.Prog64) []byte {
	t.Helper()
	return elfFile(t, elf.Header64{Type: uint16(elf.ET_EXEC), Machine: uint16(elf.EM_X86_64)}, progs, nil, tag)
}

// kernelModule is a kernel module that says only what it depends on.
func kernelModule(t testing.TB, info ...string) []byte {
	t.Helper()
	return elfFile(t, elf.Header64{Type: uint16(elf.ET_REL), Machine: uint16(elf.EM_X86_64)}, nil, []byte(strings.Join(info, "\x00")+"\x00"), "")
}

// elfFile writes an ELF file with program headers, a section .modinfo where there is one, and a tail.
func elfFile(t testing.TB, h elf.Header64, progs []elf.Prog64, modinfo []byte, tail string) []byte {
	t.Helper()
	const headerSize, progSize, sectionSize = 64, 56, 64
	copy(h.Ident[:], elf.ELFMAG)
	h.Ident[elf.EI_CLASS] = byte(elf.ELFCLASS64)
	h.Ident[elf.EI_DATA] = byte(elf.ELFDATA2LSB)
	h.Ident[elf.EI_VERSION] = byte(elf.EV_CURRENT)
	h.Version = uint32(elf.EV_CURRENT)
	h.Ehsize, h.Phentsize, h.Shentsize = headerSize, progSize, sectionSize
	h.Phoff, h.Phnum = headerSize, uint16(len(progs))
	names := []byte("\x00.modinfo\x00.shstrtab\x00")
	data := uint64(headerSize + progSize*len(progs))
	sections := []elf.Section64{
		{},
		{Name: 1, Type: uint32(elf.SHT_PROGBITS), Off: data, Size: uint64(len(modinfo))},
		{Name: 10, Type: uint32(elf.SHT_STRTAB), Off: data + uint64(len(modinfo)), Size: uint64(len(names))},
	}
	h.Shoff, h.Shnum, h.Shstrndx = data+uint64(len(modinfo)+len(names)), uint16(len(sections)), 2
	var b bytes.Buffer
	for _, v := range []any{h, progs, modinfo, names, sections, []byte(tail)} {
		if err := binary.Write(&b, binary.LittleEndian, v); err != nil {
			t.Fatal(err)
		}
	}
	return b.Bytes()
}

// put writes a file and the directories above it.
func put(t testing.TB, path string, data []byte) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, data, 0o644); err != nil {
		t.Fatal(err)
	}
}

func get(t testing.TB, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// smallRoot stands in for a Debian root filesystem and its kernel: what a build does around them is the same.
type smallRoot struct {
	made    atomic.Int32
	content string
	hold    func(ctx context.Context, tmp string) error // called while it is being made
}

func (s *smallRoot) make(ctx context.Context, img, tmp string) (Manifest, []module, error) {
	s.made.Add(1)
	if s.hold != nil {
		if err := s.hold(ctx, tmp); err != nil {
			return Manifest{}, nil, err
		}
	}
	for name, data := range map[string]string{kernelFile: "kernel", rootfsFile: "root filesystem " + s.content} {
		if err := writeFile(filepath.Join(img, name), []byte(data)); err != nil {
			return Manifest{}, nil, err
		}
	}
	m := Manifest{Kernel: "6.12.0-cloud-amd64", Packages: []Package{{"bash", "5.2"}}}
	return m, []module{{"failover.ko", []byte("failover")}, {"virtio_net.ko", []byte("virtio_net")}}, nil
}

// building is a build of a small root, and what it said.
type building struct {
	*smallRoot
	Options
	said *strings.Builder
}

func newBuilding(t testing.TB) *building {
	dir := t.TempDir()
	agent := filepath.Join(t.TempDir(), "guestagent")
	put(t, agent, executable(t, "one"))
	said := &strings.Builder{}
	return &building{
		smallRoot: &smallRoot{},
		said:      said,
		Options:   Options{Dir: filepath.Join(dir, "images"), Agent: agent, Progress: func(s string) { said.WriteString(s + "\n") }},
	}
}

func (b *building) build(ctx context.Context) (Image, error) {
	w, err := newBuilder(b.Options)
	if err != nil {
		return Image{}, err
	}
	w.makeRoot = b.smallRoot.make
	return w.run(ctx)
}

func (b *building) mustBuild(t testing.TB) Image {
	t.Helper()
	img, err := b.build(t.Context())
	if err != nil {
		t.Fatalf("%v\n%s", err, b.said)
	}
	return img
}

// entries are the names in a directory.
func entries(t testing.TB, dir string) []string {
	t.Helper()
	all, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range all {
		names = append(names, e.Name())
	}
	return names
}
