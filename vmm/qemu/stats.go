package qemu

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ephemeral-run/ephemeral/vmm"
)

// Stats reads memory and CPU time of the QEMU process from /proc.
func (m *machine) Stats() (vmm.Stats, error) {
	select {
	case <-m.process.Done(): // its pid may be another's by now
		return vmm.Stats{}, m.wrap("stats of", vmm.ErrClosed)
	default:
	}
	s, err := processStats(m.process.Pid())
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) {
		err = vmm.ErrClosed
	}
	return s, m.wrap("stats of", err)
}

func processStats(pid int) (vmm.Stats, error) {
	dir := fmt.Sprintf("/proc/%d/", pid)
	rollup, err := os.ReadFile(dir + "smaps_rollup")
	if err != nil {
		return vmm.Stats{}, err
	}
	private, err := privateBytes(rollup)
	if err != nil {
		return vmm.Stats{}, err
	}
	stat, err := os.ReadFile(dir + "stat")
	if err != nil {
		return vmm.Stats{}, err
	}
	cpu, err := cpuTime(string(stat))
	if err != nil {
		return vmm.Stats{}, err
	}
	return vmm.Stats{Pid: pid, PrivateBytes: private, CPU: cpu}, nil
}

// privateBytes sums Private_Clean and Private_Dirty of a smaps_rollup.
func privateBytes(rollup []byte) (int64, error) {
	var sum int64
	found := 0
	scan := bufio.NewScanner(bytes.NewReader(rollup))
	for scan.Scan() {
		name, value, _ := strings.Cut(scan.Text(), ":")
		if name != "Private_Clean" && name != "Private_Dirty" {
			continue
		}
		kib, err := strconv.ParseInt(strings.TrimSpace(strings.TrimSuffix(value, "kB")), 10, 64)
		if err != nil {
			return 0, fmt.Errorf("smaps_rollup: %s: %w", name, err)
		}
		sum += kib << 10
		found++
	}
	if found != 2 {
		return 0, errors.New("smaps_rollup: private memory is missing")
	}
	return sum, nil
}

// userHz is the unit of times in /proc, in hertz: USER_HZ, 100 on every architecture that Go supports.
const userHz = 100

// cpuTime is user and system time in a line of /proc/pid/stat, see proc_pid_stat(5).
func cpuTime(stat string) (time.Duration, error) {
	// The second field, the program's name in parentheses, may hold anything. Fields 14 and 15 are the times.
	_, rest, ok := cutLast(stat, ") ")
	fields := strings.Fields(rest)
	if !ok || len(fields) < 13 {
		return 0, errors.New("stat: too few fields")
	}
	var ticks int64
	for _, field := range fields[11:13] {
		n, err := strconv.ParseInt(field, 10, 64)
		if err != nil {
			return 0, fmt.Errorf("stat: %w", err)
		}
		ticks += n
	}
	return time.Duration(ticks) * (time.Second / userHz), nil
}

func cutLast(s, sep string) (before, after string, found bool) {
	if i := strings.LastIndex(s, sep); i >= 0 {
		return s[:i], s[i+len(sep):], true
	}
	return s, "", false
}
