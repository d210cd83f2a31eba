package provision

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
)

// Collected says what Collect removed, or would.
type Collected struct {
	Templates []string `json:"templates"` // keys
	Leftovers int      `json:"leftovers"` // directories that interrupted builds of templates left
	Bytes     int64    `json:"bytes"`     // of the templates' files
}

// Collect removes the templates in a data directory that no process uses, but for those whose image, given by its digest, is to be
// kept; and what interrupted builds of templates left. With dry it tells only what it would remove. It goes on after an error and
// joins them.
func Collect(dataDir string, keep func(image string) bool, dry bool) (out Collected, err error) {
	dir := filepath.Join(dataDir, "templates")
	paths, err := unused(dir, templateKey.MatchString)
	errs := []error{err}
	for _, path := range paths {
		if image, err := imageOf(path); err == nil && keep(image) {
			continue
		}
		size, removed := sizeOf(path), true
		if !dry {
			if removed, err = discard(path); err != nil {
				errs = append(errs, fmt.Errorf("remove template %s: %w", filepath.Base(path), err))
			}
		}
		if removed {
			out.Templates = append(out.Templates, filepath.Base(path))
			out.Bytes += size
		}
	}
	if dry {
		paths, err = unused(dir, halfBuilt)
		out.Leftovers = len(paths)
	} else {
		out.Leftovers, err = removeUnused(dir, halfBuilt)
	}
	return out, errors.Join(append(errs, err)...)
}

// imageOf is the digest of the image that a template was made of, as its manifest says.
func imageOf(dir string) (string, error) {
	f, err := os.Open(filepath.Join(dir, manifestFile))
	if err != nil {
		return "", err
	}
	var m manifest
	err = json.NewDecoder(io.LimitReader(f, maxManifest)).Decode(&m)
	return m.Traits.Image, errors.Join(err, f.Close())
}

// sizeOf is the size of the files in a directory, in bytes. What cannot be looked at counts nothing.
func sizeOf(dir string) (n int64) {
	all, err := os.ReadDir(dir)
	if err != nil {
		return 0
	}
	for _, e := range all {
		if info, err := e.Info(); err == nil && info.Mode().IsRegular() {
			n += info.Size()
		}
	}
	return n
}
