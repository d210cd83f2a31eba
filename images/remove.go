package images

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"

	"golang.org/x/sys/unix"
)

// Removed says what was taken away, or would be.
type Removed struct {
	Images    []string `json:"images"`    // names that no longer mean an image
	Builds    []string `json:"builds"`    // builds, by image and start of the digest: base-0123456789abcdef
	Leftovers int      `json:"leftovers"` // directories that interrupted builds or removals left
	Bytes     int64    `json:"bytes"`     // of files that no other build shares
}

// buildRE matches the directory of a build: the image's name and the first 16 digits of the digest.
var buildRE = regexp.MustCompile(`^\.([a-z0-9][a-z0-9-]{0,62})-([0-9a-f]{16})$`)

// goneName is a new name for what is about to be deleted: removeLeftovers goes on where an interrupted removal ended.
func goneName(dir string) string { return filepath.Join(dir, leftoverPrefix+"gone-"+rand.Text()) }

// Remove removes an image with all its builds. It is refused while a process uses one of them (ErrInUse); when it is interrupted,
// there is either the image as before, or none. Errors: ErrNotBuilt.
func Remove(ctx context.Context, dir, name string) (out Removed, err error) {
	if !ValidName(name) {
		return out, fmt.Errorf("image name %q: want 1 to 63 of a-z, 0-9 and \"-\"", name)
	}
	s, err := openStore(ctx, dir)
	if err != nil {
		return out, err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	if out.Leftovers, err = s.removeLeftovers(); err != nil {
		return out, err
	}
	err = s.remove(name, &out)
	return out, err
}

// CollectOptions says what Collect leaves.
type CollectOptions struct {
	All  bool     // also images that no process uses
	Keep []string // but not these: names of images
	Dry  bool     // remove nothing, tell only what would be
}

// Collect removes the builds that no image's name means any more and no process uses, and what interrupted builds left. With All it
// removes images too. It goes on after an error and joins them.
func Collect(ctx context.Context, dir string, o CollectOptions) (out Removed, err error) {
	s, err := openStore(ctx, dir)
	if err != nil {
		return out, err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	s.dry = o.Dry
	if out.Leftovers, err = s.removeLeftovers(); err != nil {
		return out, err
	}
	var errs []error
	names, err := List(s.dir)
	errs = append(errs, err)
	for _, name := range names {
		if !o.All || slices.Contains(o.Keep, name) {
			continue
		}
		if err := s.remove(name, &out); !errors.Is(err, ErrInUse) {
			errs = append(errs, err)
		}
	}
	builds, err := s.builds("")
	errs = append(errs, err)
	for _, b := range builds {
		if s.meant(b) || slices.Contains(out.Builds, b[1:]) {
			continue
		}
		if err := s.removeBuild(b, &out); !errors.Is(err, ErrInUse) {
			errs = append(errs, err)
		}
	}
	return out, errors.Join(errs...)
}

// remove removes the link of an image, then its builds.
func (s *store) remove(name string, out *Removed) (err error) {
	link := filepath.Join(s.dir, name)
	fi, err := os.Lstat(link)
	if errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("%w: no image %s; `ephemeral image list` names those that are there", ErrNotBuilt, name)
	}
	if err != nil {
		return fmt.Errorf("remove image %s: %w", name, err)
	}
	if fi.Mode()&os.ModeSymlink == 0 {
		return fmt.Errorf("%s is not a link made by a build; remove it yourself", link)
	}
	builds, err := s.builds(name)
	if err != nil {
		return err
	}
	// All are locked before the first is touched: nobody can begin to use one, and the image is removed whole or not at all.
	locks := make([]*os.File, 0, len(builds))
	defer func() {
		for _, f := range locks {
			err = errors.Join(err, f.Close())
		}
	}()
	paths := make([]string, len(builds))
	for i, b := range builds {
		paths[i] = filepath.Join(s.dir, b)
	}
	if at, err := resolve(link); err == nil && !slices.Contains(paths, at) {
		paths = append(paths, at) // a link to somewhere else: what is there stays
	}
	for _, path := range paths {
		f, err := lockBuild(path, unix.LOCK_EX|unix.LOCK_NB)
		if errors.Is(err, ErrInUse) {
			return fmt.Errorf("%w: a node serves %s (%s); take it out of EPHEMERAL_IMAGES and restart that node, or stop the node, then try again",
				ErrInUse, name, filepath.Base(path))
		}
		if err != nil {
			return err
		}
		locks = append(locks, f)
	}
	out.Images = append(out.Images, name)
	if !s.dry {
		if err := errors.Join(os.Remove(link), syncDir(s.dir)); err != nil {
			return fmt.Errorf("remove image %s: %w", name, err)
		}
	}
	for _, b := range builds {
		if err := s.delete(b, out); err != nil {
			return err
		}
	}
	return nil
}

// builds lists the directories of the builds of an image; of all images with no name.
func (s *store) builds(name string) ([]string, error) {
	all, err := os.ReadDir(s.dir)
	if err != nil {
		return nil, fmt.Errorf("list images: %w", err)
	}
	var out []string
	for _, e := range all {
		if m := buildRE.FindStringSubmatch(e.Name()); m != nil && e.IsDir() && (name == "" || m[1] == name) {
			out = append(out, e.Name())
		}
	}
	return out, nil
}

// meant tells whether a build is the one that its image's name means.
func (s *store) meant(build string) bool {
	target, err := os.Readlink(filepath.Join(s.dir, buildRE.FindStringSubmatch(build)[1]))
	return err == nil && target == build
}

// removeBuild removes a build that no process uses. ErrInUse: one does.
func (s *store) removeBuild(build string, out *Removed) error {
	f, err := lockBuild(filepath.Join(s.dir, build), unix.LOCK_EX|unix.LOCK_NB)
	if err != nil {
		return err
	}
	return errors.Join(s.delete(build, out), f.Close())
}

// delete deletes a build that the caller has locked. It gets another name first: half of one must not look like one.
func (s *store) delete(build string, out *Removed) error {
	path := filepath.Join(s.dir, build)
	out.Builds = append(out.Builds, build[1:])
	out.Bytes += unshared(path)
	if s.dry {
		return nil
	}
	gone := goneName(s.dir)
	if err := os.Rename(path, gone); err != nil {
		return fmt.Errorf("remove image build: %w", err)
	}
	if err := os.RemoveAll(gone); err != nil {
		return fmt.Errorf("remove image build: %w", err)
	}
	return nil
}

// unshared is how many bytes a directory's files have that no other directory has a link to.
func unshared(dir string) int64 {
	n := int64(0)
	all, err := os.ReadDir(dir)
	if err != nil {
		return 0
	}
	for _, e := range all {
		var st unix.Stat_t
		if unix.Lstat(filepath.Join(dir, e.Name()), &st) == nil && st.Nlink == 1 {
			n += st.Size
		}
	}
	return n
}
