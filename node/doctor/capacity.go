package doctor

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

const (
	mib = 1 << 20
	// machineOverhead is what one machine takes beside its own memory, in MiB: the VMM and, under emulation, translated code.
	machineOverhead = 128
	// machineFiles is how many files the node holds open for one machine, and serveFiles for all else.
	machineFiles, serveFiles = 16, 1024
	// machineInodes is how many files one machine's directory has at most.
	machineInodes = 64
	// diskReserve is what Redis and the logs may take, in MiB.
	diskReserve = 512
)

func checkMemory(_ context.Context, c *Config) Check {
	b, err := c.Host.ReadFile("/proc/meminfo")
	if err != nil {
		return fail("mount /proc", "available memory is not known: %v", err)
	}
	available, err := memAvailable(b)
	if err != nil {
		return fail("use Linux 3.14 or newer", "available memory is not known: %v", err)
	}
	// The template's memory is shared by all; a fresh clone has its overhead only.
	ready := c.MemoryMiB + max(c.MinReady, 1)*machineOverhead
	worst := c.MemoryMiB + c.MaxMachines*(c.MemoryMiB+machineOverhead)
	detail := fmt.Sprintf("%d MiB available; %d ready machines take %d MiB, %d in full use %d MiB",
		available, max(c.MinReady, 1), ready, c.MaxMachines, worst)
	fix := "add memory, or lower EPHEMERAL_POOL_MIN_READY, EPHEMERAL_POOL_MAX_MACHINES or the machines' memory"
	switch {
	case ready > available:
		return fail(fix, "%s", detail)
	case worst > available:
		return warn(fix, "%s", detail)
	default:
		return ok("%s", detail)
	}
}

// memAvailable reads MemAvailable of proc_meminfo(5), in MiB.
func memAvailable(meminfo []byte) (int, error) {
	for line := range bytes.Lines(meminfo) {
		fields := strings.Fields(string(line))
		if len(fields) < 2 || fields[0] != "MemAvailable:" {
			continue
		}
		kib, err := strconv.ParseInt(fields[1], 10, 64)
		if err != nil || kib < 0 {
			return 0, fmt.Errorf("MemAvailable is %q", fields[1])
		}
		return int(kib / 1024), nil
	}
	return 0, fmt.Errorf("/proc/meminfo has no MemAvailable")
}

func checkDisk(_ context.Context, c *Config) Check {
	s, err := c.Host.Space(c.DataDir)
	if err != nil {
		return fail("make the data directory, or choose another by EPHEMERAL_DATA_DIR", "%v", err)
	}
	free := int(min(s.Bytes/mib, 1<<40))
	// A template is written before the one it replaces goes.
	need := 2*c.MemoryMiB + diskReserve
	detail := fmt.Sprintf("%d MiB free in %s; templates and Redis take %d MiB", free, s.Dir, need)
	fix := "free some space, or choose another directory by EPHEMERAL_DATA_DIR"
	switch {
	case free < need:
		return fail(fix, "%s", detail)
	case free < 2*need:
		return warn(fix, "%s", detail)
	default:
		return ok("%s", detail)
	}
}

func checkInodes(_ context.Context, c *Config) Check {
	s, err := c.Host.Space(c.DataDir)
	if err != nil {
		return fail("make the data directory, or choose another by EPHEMERAL_DATA_DIR", "%v", err)
	}
	if s.Inodes == 0 {
		return ok("%s has no fixed number of inodes", s.Dir)
	}
	need := uint64(c.MaxMachines+16) * machineInodes
	fix := "remove files, or choose another directory by EPHEMERAL_DATA_DIR"
	switch {
	case s.FreeInodes < need:
		return fail(fix, "%d inodes free in %s, %d needed", s.FreeInodes, s.Dir, need)
	case s.FreeInodes < 4*need:
		return warn(fix, "%d inodes free in %s, %d needed", s.FreeInodes, s.Dir, need)
	default:
		return ok("%d inodes free in %s", s.FreeInodes, s.Dir)
	}
}

func checkOpenFiles(_ context.Context, c *Config) Check {
	soft, hard, err := c.Host.OpenFiles()
	if err != nil {
		return fail("mount /proc", "%v", err)
	}
	need := uint64(c.MaxMachines)*machineFiles + serveFiles
	fix := fmt.Sprintf("raise it: `ulimit -n %d`, or LimitNOFILE in the service unit", need)
	switch {
	// A Go program raises its soft limit to the hard one when it starts.
	case hard < need:
		return fail(fix, "at most %d open files, %d needed for %d machines", hard, need, c.MaxMachines)
	case soft < need:
		return warn(fix, "%d open files (can be raised to %d), %d needed for %d machines", soft, hard, need, c.MaxMachines)
	default:
		return ok("%d open files allowed, %d needed for %d machines", soft, need, c.MaxMachines)
	}
}

// fastClocks are read without leaving the program that asks for the time.
var fastClocks = []string{"tsc", "kvm-clock", "hyperv_clocksource_tsc_page"}

func checkClockSource(_ context.Context, c *Config) Check {
	b, err := c.Host.ReadFile("/sys/devices/system/clocksource/clocksource0/current_clocksource")
	if err != nil {
		return warn("mount /sys", "the clock source is not known: %v", err)
	}
	source := strings.TrimSpace(string(b))
	if !slices.Contains(fastClocks, source) {
		return warn("boot the host with tsc=reliable if its time stamp counter is stable",
			"%s is slow to read: every time stamp costs microseconds", source)
	}
	return ok("%s", source)
}

func checkEntropy(_ context.Context, c *Config) Check {
	if err := c.Host.Entropy(); err != nil {
		return fail("wait for the kernel to gather entropy, or give the host a virtio-rng device", "%v", err)
	}
	return ok("the kernel's random generator is ready")
}
