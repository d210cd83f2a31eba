package images

import (
	"bytes"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/ulikunitz/xz"
)

// maxModule bounds a decompressed kernel module, in bytes.
const maxModule = 32 << 20

// module is a kernel module, decompressed.
type module struct {
	Name string // file name, e.g. "virtio_blk.ko"
	Data []byte
}

// moduleTree finds modules below a /usr/lib/modules/<version> directory.
type moduleTree struct {
	builtin map[string]bool
	files   map[string]string // by name with "_" for "-"
}

// canonical is a module's name as the kernel uses it: "-" and "_" are the same.
func canonical(name string) string { return strings.ReplaceAll(name, "-", "_") }

// moduleName takes the name out of a path like kernel/fs/erofs/erofs.ko.xz; "" when it is none of a module.
func moduleName(path string) string {
	base := filepath.Base(path)
	for _, suffix := range []string{".ko", ".ko.xz"} {
		if name, ok := strings.CutSuffix(base, suffix); ok {
			return canonical(name)
		}
	}
	return ""
}

func openModuleTree(dir string) (*moduleTree, error) {
	t := &moduleTree{builtin: map[string]bool{}, files: map[string]string{}}
	b, err := os.ReadFile(filepath.Join(dir, "modules.builtin"))
	if err != nil {
		return nil, fmt.Errorf("read list of built-in modules: %w", err)
	}
	for line := range strings.Lines(string(b)) {
		if name := moduleName(strings.TrimSpace(line)); name != "" {
			t.builtin[name] = true
		}
	}
	err = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() {
			if name := moduleName(path); name != "" {
				t.files[name] = path
			}
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list kernel modules in %s: %w", dir, err)
	}
	return t, nil
}

// collect returns the wanted modules and those they depend on in load order, without those built into the kernel.
func (t *moduleTree) collect(wanted []string) ([]module, error) {
	var out []module
	const visiting, done = 1, 2
	state := map[string]int{}
	var visit func(name string, from string) error
	visit = func(name, from string) error {
		name = canonical(name)
		if t.builtin[name] || state[name] == done {
			return nil
		}
		if state[name] == visiting {
			return fmt.Errorf("kernel modules %s and %s depend on each other", name, from)
		}
		path, ok := t.files[name]
		if !ok {
			return fmt.Errorf("kernel has no module %s (wanted by %s)", name, from)
		}
		state[name] = visiting
		data, err := readModule(path)
		if err != nil {
			return err
		}
		deps, soft, err := moduleDeps(data)
		if err != nil {
			return fmt.Errorf("read dependencies of %s: %w", path, err)
		}
		for _, dep := range soft {
			// A soft dependency may be an alias or be missing: the module loads without it.
			if _, ok := t.files[canonical(dep)]; ok {
				deps = append(deps, dep)
			}
		}
		for _, dep := range deps {
			if err := visit(dep, name); err != nil {
				return err
			}
		}
		state[name] = done
		out = append(out, module{Name: name + ".ko", Data: data})
		return nil
	}
	for _, name := range wanted {
		if err := visit(name, "the recipe"); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// readModule reads a module and decompresses it: a guest without a decompressor in its kernel can load it as well.
func readModule(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("open kernel module: %w", err)
	}
	defer f.Close()
	var r io.Reader = f
	if strings.HasSuffix(path, ".xz") {
		if r, err = xz.NewReader(f); err != nil {
			return nil, fmt.Errorf("decompress kernel module %s: %w", path, err)
		}
	}
	b, err := io.ReadAll(io.LimitReader(r, maxModule+1))
	if err != nil {
		return nil, fmt.Errorf("read kernel module %s: %w", path, err)
	}
	if len(b) > maxModule {
		return nil, fmt.Errorf("kernel module %s is larger than %d bytes", path, maxModule)
	}
	return b, nil
}

// moduleDeps reads what a module says it depends on: modinfo(8), section .modinfo, keys depends and softdep.
func moduleDeps(data []byte) (deps, soft []string, err error) {
	f, err := elf.NewFile(bytes.NewReader(data))
	if err != nil {
		return nil, nil, err
	}
	defer f.Close()
	sec := f.Section(".modinfo")
	if sec == nil {
		return nil, nil, errors.New("no .modinfo section")
	}
	info, err := sec.Data()
	if err != nil {
		return nil, nil, err
	}
	for entry := range strings.SplitSeq(string(info), "\x00") {
		key, value, _ := strings.Cut(entry, "=")
		switch key {
		case "depends":
			for dep := range strings.SplitSeq(value, ",") {
				if dep != "" {
					deps = append(deps, dep)
				}
			}
		case "softdep":
			soft = append(soft, preDeps(value)...)
		}
	}
	return deps, soft, nil
}

// preDeps takes the modules to load before out of a line like "pre: crc32c post: foo".
func preDeps(line string) []string {
	var out []string
	pre := false
	for word := range strings.FieldsSeq(line) {
		switch word {
		case "pre:":
			pre = true
		case "post:":
			pre = false
		default:
			if pre {
				out = append(out, word)
			}
		}
	}
	return out
}
