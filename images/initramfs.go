package images

import (
	"bytes"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/cavaliergopher/cpio"
)

// moduleDir is where the agent finds the kernel modules in the initramfs, with the file "order": one file name a line, in
// load order.
const moduleDir = "lib/modules"

// fixedTime is the time of every file of an image, so that the same inputs give the same bytes.
var fixedTime = time.Unix(1735689600, 0).UTC() // 2025-01-01

// writeInitramfs writes an uncompressed newc archive: under emulation decompressing would cost more than reading.
func writeInitramfs(w io.Writer, agent []byte, modules []module) error {
	cw := cpio.NewWriter(w)
	inode := int64(0)
	add := func(name string, mode cpio.FileMode, data []byte) error {
		inode++
		h := &cpio.Header{Name: name, Mode: mode, Size: int64(len(data)), ModTime: fixedTime, Inode: inode, Links: 1}
		if err := cw.WriteHeader(h); err != nil {
			return fmt.Errorf("write initramfs entry %s: %w", name, noSpace(err))
		}
		if _, err := cw.Write(data); err != nil {
			return fmt.Errorf("write initramfs entry %s: %w", name, noSpace(err))
		}
		return nil
	}
	for _, dir := range []string{"dev", "proc", "sys", "root", "lib", moduleDir} {
		if err := add(dir, cpio.TypeDir|0o755, nil); err != nil {
			return err
		}
	}
	if err := add("init", cpio.TypeReg|0o755, agent); err != nil {
		return err
	}
	var order strings.Builder
	for _, m := range modules {
		order.WriteString(m.Name + "\n")
		if err := add(moduleDir+"/"+m.Name, cpio.TypeReg|0o644, m.Data); err != nil {
			return err
		}
	}
	if err := add(moduleDir+"/order", cpio.TypeReg|0o644, []byte(order.String())); err != nil {
		return err
	}
	if err := cw.Close(); err != nil {
		return fmt.Errorf("finish initramfs: %w", noSpace(err))
	}
	return nil
}

// readInitramfs returns what writeInitramfs was given.
func readInitramfs(r io.Reader) (agent []byte, modules []module, err error) {
	cr := cpio.NewReader(r)
	files := map[string][]byte{}
	for {
		h, err := cr.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, nil, fmt.Errorf("read initramfs: %w", err)
		}
		if !h.Mode.IsRegular() {
			continue
		}
		b, err := io.ReadAll(cr)
		if err != nil {
			return nil, nil, fmt.Errorf("read initramfs entry %s: %w", h.Name, err)
		}
		files[h.Name] = b
	}
	order, ok := files[moduleDir+"/order"]
	if !ok {
		return nil, nil, errors.New("initramfs has no order of modules")
	}
	for line := range strings.Lines(string(order)) {
		name := strings.TrimSpace(line)
		data, ok := files[moduleDir+"/"+name]
		if !ok {
			return nil, nil, fmt.Errorf("initramfs has no module %s", name)
		}
		modules = append(modules, module{Name: name, Data: data})
	}
	return files["init"], modules, nil
}

// createInitramfs writes the initramfs of an image directory.
func createInitramfs(dir string, agent []byte, modules []module) error {
	var b bytes.Buffer
	if err := writeInitramfs(&b, agent, modules); err != nil {
		return err
	}
	return writeFile(filepath.Join(dir, initramfsFile), b.Bytes())
}

// readAgent reads the agent's program and makes sure that it runs in a machine with nothing else in it.
func readAgent(path string) ([]byte, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read agent program: %w; build it with `make build`", err)
	}
	f, err := elf.NewFile(bytes.NewReader(b))
	if err != nil {
		return nil, fmt.Errorf("agent program %s: %w", path, err)
	}
	defer f.Close()
	if f.Machine != elf.EM_X86_64 || f.Type != elf.ET_EXEC && f.Type != elf.ET_DYN {
		return nil, fmt.Errorf("agent program %s is not an x86-64 executable", path)
	}
	for _, p := range f.Progs {
		if p.Type == elf.PT_INTERP {
			return nil, fmt.Errorf("agent program %s is not statically linked; build it with CGO_ENABLED=0", path)
		}
	}
	return b, nil
}
