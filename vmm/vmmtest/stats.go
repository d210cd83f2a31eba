package vmmtest

import (
	"slices"
	"time"
)

// Median of durations; 0 of none.
func Median(d []time.Duration) time.Duration {
	if len(d) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(d))
	return (sorted[(len(sorted)-1)/2] + sorted[len(sorted)/2]) / 2
}
