package main

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"text/tabwriter"
	"time"

	"github.com/ephemeral-run/ephemeral/vmm/pool/chart"
)

// writeSimulated writes what a simulation gave for people to read.
func writeSimulated(w io.Writer, out simulated) {
	r := out.Result
	seconds := func(s float64) string { return fmt.Sprintf("%.3f s", s) }
	percent := func(share float64) string { return fmt.Sprintf("%.3g%%", share*100) }
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	line := func(name, format string, args ...any) { fmt.Fprintf(table, name+"\t"+format+"\n", args...) }
	line("claims", "%d over %s (%s)", r.Arrivals, time.Duration(r.DurationSeconds*float64(time.Second)).Round(time.Second), visible(out.Workload))
	line("found one ready", "%s (missed: %s)", percent(r.HitRate), percent(r.MissRate))
	line("waited", "%s of those served; lost: %s", percent(r.WaitProbability), percent(r.LossProbability))
	mean := seconds(r.WaitMean)
	if r.WaitMeanError > 0 { // unknown for a few claims
		mean += " ± " + seconds(r.WaitMeanError)
	}
	line("wait", "mean %s, p50 %s, p95 %s, p99 %s, longest %s", mean, seconds(r.WaitP50), seconds(r.WaitP95), seconds(r.WaitP99), seconds(r.WaitMax))
	line("machines", "%.2f ready, %.2f in use on average; %d at most", r.MeanReady, r.MeanLeased, r.PeakMachines)
	line("cost", "%.2f machine-hours, of which %.2f ready; %.2f GiB-hours; %d MiB at most", r.MachineHours, r.ReadyHours, r.MemoryHours, r.PeakMemoryMiB)
	line("restores", "%d, and %d failed; %d machines were given up as too many, %d as too old", r.Restores, r.RestoreFailures, r.Surplus, r.Expired)
	line("target", "%.2f on average. %s", r.MeanTarget, r.Reason)
	_ = table.Flush() // as with every line here, a screen that is gone cannot be told so
	fmt.Fprintln(w)
	_ = chart.WritePool(w, r)
	if rec := out.Recommendation; rec != nil {
		fmt.Fprintln(w)
		_ = chart.WriteTradeOff(w, *rec)
		fmt.Fprintf(w, "\n%s\n", rec.Reason)
		for _, name := range slices.Sorted(maps.Keys(out.Settings)) {
			fmt.Fprintf(w, "%s=%s\n", name, out.Settings[name])
		}
	}
	for _, path := range out.Plots {
		fmt.Fprintln(w, path)
	}
}
