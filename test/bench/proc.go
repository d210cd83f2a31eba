package main

import (
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// cpuTime is how long a process, all its threads, has worked since it was started: the process's CPU-time clock, as
// clock_getcpuclockid(3) names it.
func cpuTime(pid int) (time.Duration, error) {
	const scheduled = 2 // CPUCLOCK_SCHED: as the scheduler counts, in nanoseconds
	var t unix.Timespec
	if err := unix.ClockGettime(int32(^pid<<3|scheduled), &t); err != nil {
		return 0, fmt.Errorf("CPU time of process %d: %w", pid, err)
	}
	return time.Duration(t.Nano()), nil
}
