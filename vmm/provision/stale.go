package provision

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ephemeral-run/ephemeral/vmm/network"
)

// killStale kills processes of machines' users that are in the node's network namespace but in no cgroup of it, where the
// jail would have found them, and waits until they have ended.
func (p *Provisioner) killStale(ctx context.Context) (killed int, err error) {
	for pause := time.Millisecond; ; pause = min(2*pause, 50*time.Millisecond) {
		pids, err := inNamespace(p.config, p.owns)
		if err != nil || len(pids) == 0 {
			return killed, err
		}
		n := 0
		var errs []error
		for _, pid := range pids {
			ok, err := p.kill(pid)
			if ok {
				n++
			}
			errs = append(errs, err)
		}
		killed = max(killed, n)
		if err := errors.Join(errs...); err != nil {
			return killed, err
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return killed, fmt.Errorf("%d processes do not end: %w", len(pids), context.Cause(ctx))
		}
	}
}

// kill sends SIGKILL to a process that is still the one meant once a descriptor pins it: no recycled pid is signalled.
func (p *Provisioner) kill(pid int) (bool, error) {
	fd, err := unix.PidfdOpen(pid, 0)
	if errors.Is(err, unix.ESRCH) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("open process %d: %w", pid, err)
	}
	defer func() { _ = unix.Close(fd) }()
	var ns unix.Stat_t
	if err := unix.Stat(filepath.Join("/run/netns", network.Prefix+p.config.Node), &ns); err != nil {
		return false, fmt.Errorf("look at network namespace: %w", err)
	}
	if !belongs(p.config, pid, ns.Ino, p.owns) {
		return false, nil
	}
	err = unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0)
	if errors.Is(err, unix.ESRCH) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("kill process %d: %w", pid, err)
	}
	return true, nil
}
