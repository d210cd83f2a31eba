package kvmbox

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
)

// pack makes an EROFS image with everything that is carried at the path output.
func pack(ctx context.Context, carry map[string]string, tmp, output string) error {
	tree := filepath.Join(tmp, "carry")
	if err := os.Mkdir(tree, 0o755); err != nil {
		return err
	}
	for name, path := range carry {
		target := filepath.Join(tree, name)
		if err := os.MkdirAll(filepath.Dir(target), 0o755); err != nil {
			return err
		}
		if err := place(path, target); err != nil {
			return fmt.Errorf("carry %s: %w", path, err)
		}
	}
	if out, err := exec.CommandContext(ctx, "mkfs.erofs", "--quiet", output, tree).CombinedOutput(); err != nil {
		return fmt.Errorf("mkfs.erofs: %w: %s", err, out)
	}
	return os.RemoveAll(tree)
}

// place puts a file, link or directory at target.
func place(path, target string) error {
	return filepath.WalkDir(path, func(file string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(path, file)
		if err != nil {
			return err
		}
		to := filepath.Join(target, rel)
		switch {
		case d.IsDir():
			return os.MkdirAll(to, 0o755)
		case d.Type()&fs.ModeSymlink != 0:
			link, err := os.Readlink(file)
			if err != nil {
				return err
			}
			return os.Symlink(link, to)
		case d.Type().IsRegular():
			return linkOrCopy(file, to)
		default:
			return fmt.Errorf("%s is neither file, link nor directory", file)
		}
	})
}

// linkOrCopy spares the copy where both are on one file system.
func linkOrCopy(from, to string) error {
	if os.Link(from, to) == nil {
		return nil
	}
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	info, err := in.Stat()
	if err != nil {
		return err
	}
	out, err := os.OpenFile(to, os.O_CREATE|os.O_EXCL|os.O_WRONLY, info.Mode().Perm())
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	return errors.Join(err, out.Close())
}
