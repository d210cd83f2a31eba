package images

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"strings"
)

// Bounds of what the layers of a container image may hold together.
const (
	maxLayers       = 256
	maxLayerEntries = 1_000_000
	maxLayerBytes   = 16 << 30
	maxEntryName    = 4096
)

// The names of whiteouts: https://github.com/opencontainers/image-spec/blob/main/layer.md.
const (
	whiteoutPrefix = ".wh."
	opaqueName     = ".wh..wh..opq"
)

// ErrLayer: a layer of a container image is refused.
var ErrLayer = errors.New("layer refused")

// tree is a directory into which layers are unpacked, one over the other. Nothing outside of it can be reached: names and
// symbolic links are resolved by the kernel below the directory.
type tree struct {
	root    *os.Root
	entries int
	bytes   int64
	skipped int // devices and other special files: a machine has its own
}

func openTree(dir string) (*tree, error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, fmt.Errorf("open tree: %w", err)
	}
	return &tree{root: root}, nil
}

func (t *tree) close() error { return t.root.Close() }

// entryName is an entry's path below the root; "." is the root itself.
func entryName(h *tar.Header) (string, error) {
	name := path.Clean(strings.TrimLeft(h.Name, "/"))
	if len(h.Name) > maxEntryName || strings.ContainsRune(h.Name, 0) || name == ".." || strings.HasPrefix(name, "../") {
		return "", fmt.Errorf("%w: entry %.200q", ErrLayer, h.Name)
	}
	return name, nil
}

// each calls f for each entry of a layer.
func (t *tree) each(ctx context.Context, layer io.Reader, f func(name string, h *tar.Header, r io.Reader) error) error {
	left := maxLayerBytes - t.bytes
	bounded := &io.LimitedReader{R: layer, N: left + 1}
	tr := tar.NewReader(bounded)
	for {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		h, err := tr.Next()
		if bounded.N == 0 {
			return fmt.Errorf("%w: more than %d GiB unpacked", ErrLayer, maxLayerBytes>>30)
		}
		if errors.Is(err, io.EOF) {
			_, err := io.Copy(io.Discard, bounded) // what follows the archive counts for its digest
			t.bytes += left + 1 - bounded.N
			return err
		}
		if err != nil {
			return fmt.Errorf("%w: %w", ErrLayer, err)
		}
		if t.entries++; t.entries > maxLayerEntries {
			return fmt.Errorf("%w: more than %d entries", ErrLayer, maxLayerEntries)
		}
		name, err := entryName(h)
		if err != nil {
			return err
		}
		if err := f(name, h, tr); err != nil {
			return fmt.Errorf("entry %.200q: %w", h.Name, err)
		}
	}
}

// whiteouts removes what a layer says is gone from the layers below it.
func (t *tree) whiteouts(ctx context.Context, layer io.Reader) error {
	return t.each(ctx, layer, func(name string, _ *tar.Header, _ io.Reader) error {
		dir, base := path.Split(name)
		switch {
		case base == opaqueName:
			return t.empty(path.Clean(dir))
		case strings.HasPrefix(base, whiteoutPrefix):
			gone := strings.TrimPrefix(base, whiteoutPrefix)
			if gone == "" || gone == "." || gone == ".." {
				return fmt.Errorf("%w: whiteout of nothing", ErrLayer)
			}
			return absent(t.root.RemoveAll(path.Join(dir, gone)))
		}
		return nil
	})
}

// absent takes it for done that what is to be removed is not there.
func absent(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

func (t *tree) empty(dir string) error {
	f, err := t.root.Open(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	names, err := f.Readdirnames(-1)
	if err := errors.Join(err, f.Close()); err != nil {
		return err
	}
	for _, n := range names {
		if err := t.root.RemoveAll(path.Join(dir, n)); err != nil {
			return err
		}
	}
	return nil
}

// unpack puts the entries of a layer over what is there.
func (t *tree) unpack(ctx context.Context, layer io.Reader) error {
	return t.each(ctx, layer, func(name string, h *tar.Header, r io.Reader) error {
		if strings.HasPrefix(path.Base(name), whiteoutPrefix) {
			return nil
		}
		return noSpace(t.put(name, h, r))
	})
}

// put makes one entry.
func (t *tree) put(name string, h *tar.Header, r io.Reader) error {
	if name == "." {
		return nil // the root keeps its mode
	}
	if h.Uid < 0 || h.Gid < 0 || h.Uid > 1<<31-1 || h.Gid > 1<<31-1 {
		return fmt.Errorf("%w: user %d, group %d", ErrLayer, h.Uid, h.Gid)
	}
	was, err := t.root.Lstat(name)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	there := err == nil
	if there && !(was.IsDir() && h.Typeflag == tar.TypeDir) {
		if err := t.root.RemoveAll(name); err != nil {
			return err
		}
	}
	if !there {
		if err := t.root.MkdirAll(path.Dir(name), 0o755); err != nil {
			return err
		}
	}
	switch h.Typeflag {
	case tar.TypeDir:
		if err := t.root.Mkdir(name, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
	case tar.TypeReg:
		if err := t.write(name, h, r); err != nil {
			return err
		}
	case tar.TypeSymlink:
		if err := t.root.Symlink(h.Linkname, name); err != nil {
			return err
		}
		return t.root.Lchown(name, h.Uid, h.Gid)
	case tar.TypeLink:
		target, err := entryName(&tar.Header{Name: h.Linkname})
		if err != nil {
			return err
		}
		return t.root.Link(target, name)
	case tar.TypeChar, tar.TypeBlock, tar.TypeFifo:
		t.skipped++
		return nil
	default:
		return fmt.Errorf("%w: type %q", ErrLayer, h.Typeflag)
	}
	if err := t.root.Lchown(name, h.Uid, h.Gid); err != nil {
		return err
	}
	return t.root.Chmod(name, h.FileInfo().Mode()&(fs.ModePerm|fs.ModeSetuid|fs.ModeSetgid|fs.ModeSticky))
}

func (t *tree) write(name string, h *tar.Header, r io.Reader) error {
	f, err := t.root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	n, err := io.Copy(f, r)
	if err == nil && n != h.Size {
		err = fmt.Errorf("%w: %d bytes, want %d", ErrLayer, n, h.Size)
	}
	return errors.Join(err, f.Close())
}
