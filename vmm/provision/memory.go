package provision

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// reserveMiB is what stays free on the host beside machines.
const reserveMiB = 256

// Why a machine is not made now.
var (
	// ErrMemory: the host has not enough free memory for one more machine.
	ErrMemory = errors.New("not enough free memory for a machine")
	// ErrDescriptors: this process may not open as many files as one more machine needs.
	ErrDescriptors = errors.New("not enough file descriptors for a machine")
)

// What a machine takes of this process's file descriptors while it is made, at most, and what stays free beside machines:
// whoever else lives in the process must be able to go on.
const (
	machineDescriptors = 32
	reserveDescriptors = 64
)

// Admit says whether the host has the memory for one more machine (all that the guest may use, what its VMM may use beside
// it, and a reserve) and this process the file descriptors. It is for pool.WithAdmission.
func (p *Provisioner) Admit() error { return p.admit(p.config.MemoryMiB) }

// admit is Admit for a machine of a size.
func (p *Provisioner) admit(memoryMiB int) error {
	b, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return fmt.Errorf("look at free memory: %w", err)
	}
	if err := admit(b, memoryMiB+p.config.Jail.OverheadMiB); err != nil {
		return err
	}
	return admitDescriptors()
}

// admitDescriptors compares this process's open files with its limit.
func admitDescriptors() error {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return fmt.Errorf("look at the limit of open files: %w", err)
	}
	open, err := os.ReadDir("/proc/self/fd")
	if err != nil && !errors.Is(err, unix.EMFILE) {
		return fmt.Errorf("look at open files: %w", err)
	}
	return enoughDescriptors(len(open), limit.Cur, err)
}

// enoughDescriptors tells whether a machine may be made with so many files open; exhausted is why they cannot be counted.
func enoughDescriptors(open int, limit uint64, exhausted error) error {
	if exhausted == nil && uint64(open)+machineDescriptors+reserveDescriptors <= limit {
		return nil
	}
	return fmt.Errorf("%w: %d of %d are in use, a machine needs up to %d, and %d stay free; raise this process's limit of open files (LimitNOFILE= of the service, ulimit -n)",
		ErrDescriptors, open, limit, machineDescriptors, reserveDescriptors)
}

// admit compares MemAvailable of proc_meminfo(5) with a machine's need, in MiB.
func admit(meminfo []byte, need int) error {
	for line := range bytes.Lines(meminfo) {
		fields := bytes.Fields(line)
		if len(fields) != 3 || string(fields[0]) != "MemAvailable:" {
			continue
		}
		kib, err := strconv.ParseInt(string(fields[1]), 10, 64)
		if err != nil {
			return fmt.Errorf("read MemAvailable: %w", err)
		}
		if free := kib / 1024; free < int64(need+reserveMiB) {
			return fmt.Errorf("%w: %d MiB are available, a machine needs up to %d, and %d stay free; free some, or lower EPHEMERAL_MACHINE_MEMORY_MIB or EPHEMERAL_POOL_MAX_MACHINES",
				ErrMemory, free, need, reserveMiB)
		}
		return nil
	}
	return errors.New("/proc/meminfo has no MemAvailable")
}
