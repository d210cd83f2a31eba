package chart

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/guptarohit/asciigraph"

	"github.com/ephemeral-run/ephemeral/vmm/pool/simulate"
)

const columns, rows, bar = 72, 10, 30

// WritePool draws the ready machines and their target over time, as characters.
func WritePool(w io.Writer, r simulate.Result) error {
	if len(r.Series) < 2 {
		return nil
	}
	ready, target := make([]float64, len(r.Series)), make([]float64, len(r.Series))
	for i, s := range r.Series {
		ready[i], target[i] = float64(s.Counts.Ready), float64(s.Target)
	}
	// One row a machine, where they fit: the labels are then whole numbers.
	height := min(rows, max(1, int(max(slices.Max(ready), slices.Max(target)))))
	hours := r.Series[len(r.Series)-1].At.Hours()
	graph := asciigraph.PlotMany([][]float64{squeeze(ready), squeeze(target)},
		asciigraph.Height(height), asciigraph.LowerBound(0), asciigraph.Precision(0),
		asciigraph.SeriesChars(asciigraph.DefaultCharSet, asciigraph.CreateCharSet("=")),
		asciigraph.Caption(fmt.Sprintf("ready machines (-) and their target (=) over %.3g hours", hours)))
	_, err := fmt.Fprintln(w, graph)
	return err
}

// squeeze averages a series to at most as many values as there are columns.
func squeeze(series []float64) []float64 {
	if len(series) <= columns {
		return series
	}
	out := make([]float64, columns)
	for i := range out {
		from, to := i*len(series)/columns, (i+1)*len(series)/columns
		for _, v := range series[from:to] {
			out[i] += v / float64(to-from)
		}
	}
	return out
}

// WriteTradeOff writes the policies that were tried as a table with bars for their misses.
func WriteTradeOff(w io.Writer, r simulate.Recommendation) error {
	most := 0.0
	for _, p := range r.Curve {
		most = max(most, p.MissRate)
	}
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "POLICY\tREADY\tMEMORY GiB-h\tWAIT p95\tMISSES")
	for _, p := range r.Curve {
		name := fmt.Sprintf("ready %d", p.MinReady)
		if p.TargetMissRate > 0 {
			name = fmt.Sprintf("scales to %g%%", p.TargetMissRate*100)
		}
		mark := ""
		if p.Met {
			mark = " meets the goal"
		}
		if p == r.Policy {
			mark = " <- recommended"
		}
		length := 0
		if most > 0 {
			length = int(p.MissRate/most*bar + 0.5)
		}
		fmt.Fprintf(table, "%s\t%.1f\t%.2f\t%.3fs\t%.2f%%\t%s%s\n", name, p.MeanReady, p.MemoryHours, p.WaitP95, p.MissRate*100,
			strings.Repeat("█", length), mark)
	}
	return table.Flush()
}
