package jail

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"syscall"
)

// mount is one thing that a program sees.
type mount struct {
	kind mountKind
	path string // inside, and except for a symlink outside too
	link string // where a symlink leads
}

type mountKind int

const (
	readOnly mountKind = iota
	writable
	device
	symlink
)

// devices are there for every program.
var devices = []mount{
	{kind: device, path: "/dev/null"},
	{kind: device, path: "/dev/random"},
	{kind: device, path: "/dev/urandom"},
	{kind: device, path: "/dev/zero"},
}

var triplets = map[string]string{"amd64": "x86_64-linux-gnu", "arm64": "aarch64-linux-gnu"}

// libraries are the directories of the system's shared libraries, and nothing else of the system: where a distribution
// has a directory for the architecture (Debian), that one, else the whole of lib and lib64.
func libraries() ([]mount, error) {
	var mounts []mount
	add := func(path string) error {
		info, err := os.Lstat(path)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return nil
		case err != nil:
			return err
		case info.Mode()&fs.ModeSymlink != 0:
			link, err := os.Readlink(path)
			if err != nil {
				return err
			}
			mounts = append(mounts, mount{kind: symlink, path: path, link: link})
		default:
			mounts = append(mounts, mount{kind: readOnly, path: path})
		}
		return nil
	}
	paths := []string{"/lib64", "/usr/lib64", "/etc/ld.so.cache"}
	for _, lib := range []string{"/lib", "/usr/lib"} {
		info, err := os.Lstat(lib)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		own := filepath.Join(lib, triplets[runtime.GOARCH])
		if _, err := os.Stat(own); err == nil && own != lib && info.IsDir() {
			lib = own
		}
		paths = append(paths, lib)
	}
	for _, path := range paths {
		if err := add(path); err != nil {
			return nil, err
		}
	}
	return mounts, nil
}

// arrange checks mounts and puts them into the order in which they are made: what lies in another comes after it.
func arrange(mounts []mount) ([]mount, error) {
	for _, m := range mounts {
		if !filepath.IsAbs(m.path) || filepath.Clean(m.path) != m.path || m.path == "/" {
			return nil, fmt.Errorf("path %q to see in the jail must be absolute, clean and not the root", m.path)
		}
	}
	sorted := slices.Clone(mounts)
	slices.SortStableFunc(sorted, func(a, b mount) int { return cmp.Compare(a.path, b.path) })
	sorted = slices.Compact(sorted)
	for i := 1; i < len(sorted); i++ {
		if sorted[i].path == sorted[i-1].path {
			return nil, fmt.Errorf("path %s is to be two things at once", sorted[i].path)
		}
	}
	return sorted, nil
}

// inspect looks whether what is to be mounted is there. A writable directory must be one itself: a link would lead
// bubblewrap to wherever its maker wants.
func inspect(mounts []mount) error {
	for _, m := range mounts {
		switch m.kind {
		case readOnly, device:
			if _, err := os.Stat(m.path); err != nil {
				return err
			}
		case writable:
			info, err := os.Lstat(m.path)
			if err != nil {
				return err
			}
			if !info.IsDir() {
				return fmt.Errorf("writable %s is no directory", m.path)
			}
		}
	}
	return nil
}

// arguments are bubblewrap's for one mount.
func (m mount) arguments() []string {
	switch m.kind {
	case symlink:
		return []string{"--symlink", m.link, m.path}
	case device:
		return []string{"--dev-bind", m.path, m.path}
	case writable:
		return []string{"--bind", m.path, m.path}
	default:
		return []string{"--ro-bind", m.path, m.path}
	}
}

// deviceGroups are the groups that a user needs to open the devices for reading and writing: none where everybody may.
func deviceGroups(paths []string) ([]uint32, error) {
	var groups []uint32
	for _, path := range paths {
		info, err := os.Stat(path)
		if err != nil {
			return nil, err
		}
		st, ok := info.Sys().(*syscall.Stat_t)
		if !ok || info.Mode()&fs.ModeDevice == 0 {
			return nil, fmt.Errorf("%s is no device", path)
		}
		switch mode := info.Mode().Perm(); {
		case mode&0o006 == 0o006:
		case mode&0o060 == 0o060 && st.Gid != 0:
			groups = append(groups, st.Gid)
		default:
			return nil, fmt.Errorf("%s (mode %v, group %d) is open to no unprivileged user: give it a group of its own, as in chgrp kvm %s && chmod 660 %s",
				path, mode, st.Gid, path, path)
		}
	}
	slices.Sort(groups)
	return slices.Compact(groups), nil
}
