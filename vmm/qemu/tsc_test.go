package qemu

import (
	"os"
	"regexp"
	"strconv"
	"testing"
)

// TestCounterRate compares the measured rate with the clock that the kernel says the processor runs at now, which scales
// while the counter does not.
func TestCounterRate(t *testing.T) {
	rate := counterRate()
	b, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		t.Fatal(err)
	}
	match := regexp.MustCompile(`(?m)^cpu MHz\s*: ([0-9.]+)$`).FindSubmatch(b)
	if match == nil {
		if rate < 500_000 || rate > 10_000_000 {
			t.Errorf("%d kHz", rate)
		}
		return
	}
	mhz, err := strconv.ParseFloat(string(match[1]), 64)
	if err != nil {
		t.Fatal(err)
	}
	if ratio := float64(rate) / 1000 / mhz; ratio < 0.3 || ratio > 5 { // the clock scales, the counter does not
		t.Errorf("measured %d kHz, the processor runs at %.0f MHz", rate, mhz)
	}
}
