package provision

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strconv"
)

// reserveMiB is what stays free on the host beside machines.
const reserveMiB = 256

// ErrMemory: the host has not enough free memory for one more machine.
var ErrMemory = errors.New("not enough free memory for a machine")

// Admit says whether the host has the memory for one more machine: all that the guest may use, what its VMM may use beside
// it, and a reserve. It is for pool.WithAdmission.
func (p *Provisioner) Admit() error { return p.admit(p.config.MemoryMiB) }

// admit is Admit for a machine of a size.
func (p *Provisioner) admit(memoryMiB int) error {
	b, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return fmt.Errorf("look at free memory: %w", err)
	}
	return admit(b, memoryMiB+p.config.Jail.OverheadMiB)
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
			return fmt.Errorf("%w: %d MiB are available, a machine needs up to %d, and %d stay free", ErrMemory, free, need, reserveMiB)
		}
		return nil
	}
	return errors.New("/proc/meminfo has no MemAvailable")
}
