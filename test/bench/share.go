package main

import (
	"errors"
	"fmt"
	"path/filepath"

	"github.com/containerd/cgroups/v3"
	"github.com/containerd/cgroups/v3/cgroup1"
	"github.com/containerd/cgroups/v3/cgroup2"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// share is a share of the CPU under contention, for bare processes, as large as that of one of our machines: those stand
// back for other programs of the host, and a comparison with what does not would measure those programs.
type share struct {
	add    func(pid int) error
	remove func() error
}

const cgroupRoot = "/sys/fs/cgroup"

// newShare makes cgroups like those of a machine: parent/bare, with the weight (cpu.weight of cgroup v2; 100 is everyone's).
func newShare(parent string, weight int) (*share, error) {
	path := filepath.Join("/", parent, "bare")
	if cgroups.Mode() == cgroups.Unified {
		w := uint64(weight)
		m, err := cgroup2.NewManager(cgroupRoot, path, &cgroup2.Resources{CPU: &cgroup2.CPU{Weight: &w}})
		if err != nil {
			return nil, fmt.Errorf("make cgroup %s: %w", path, err)
		}
		return &share{
			add:    func(pid int) error { return m.AddProc(uint64(pid)) },
			remove: func() error { return errors.Join(m.Delete(), unix.Rmdir(filepath.Join(cgroupRoot, parent))) },
		}, nil
	}
	shares := uint64(weight) * 1024 / 100
	only := func() ([]cgroup1.Subsystem, error) {
		all, err := cgroup1.Default()
		for _, s := range all {
			if s.Name() == cgroup1.Cpu {
				return []cgroup1.Subsystem{s}, nil
			}
		}
		return nil, errors.Join(err, errors.New("no cpu controller"))
	}
	c, err := cgroup1.New(cgroup1.StaticPath(path), &specs.LinuxResources{CPU: &specs.LinuxCPU{Shares: &shares}}, cgroup1.WithHierarchy(only))
	if err != nil {
		return nil, fmt.Errorf("make cgroup %s: %w", path, err)
	}
	return &share{
		add:    func(pid int) error { return c.Add(cgroup1.Process{Pid: pid}) },
		remove: func() error { return errors.Join(c.Delete(), unix.Rmdir(filepath.Join(cgroupRoot, "cpu", parent))) },
	}, nil
}
