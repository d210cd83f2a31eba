package vmm

import (
	"os"
	"runtime"
	"strconv"
	"strings"
)

// mostPatience bounds Patience: beyond it a host is not busy but broken.
const mostPatience = 8

// Patience is the factor, 1 to 8, by which time limits for work on this host are to be longer than on one at rest: the load
// average of the last minute (proc_loadavg(5)) per processor, so that what takes longer because others want the processors
// too is not taken for hanging.
func Patience() float64 {
	b, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return 1
	}
	return patience(string(b), runtime.NumCPU())
}

func patience(loadavg string, processors int) float64 {
	first, _, _ := strings.Cut(loadavg, " ")
	load, err := strconv.ParseFloat(first, 64)
	if err != nil || !(load >= 0) {
		return 1
	}
	return min(max(1, load/float64(processors)), mostPatience)
}
