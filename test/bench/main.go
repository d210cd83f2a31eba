// Command bench measures the system side by side with bare QEMU, in one run on one host, and compares each number with
// the bar it has to hold. It needs root, an image and a built `ephemeral`.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"text/tabwriter"
)

func main() {
	var o options
	flag.StringVar(&o.output, "output", "build/bench.json", "file to write the rows to")
	flag.StringVar(&o.ephemeral, "ephemeral", "build/ephemeral", "program to measure")
	flag.StringVar(&o.image, "image", envOr("EPHEMERAL_TEST_IMAGE", "build/images/base"), "directory of the image")
	flag.BoolVar(&o.kvm, "kvm", false, "measure machines of Cloud Hypervisor, beside bare ones")
	flag.IntVar(&o.rounds, "rounds", 20, "how often each is measured; cold boots a quarter of it")
	flag.StringVar(&o.only, "only", "", "measure only this: machines, runs, bursts, gateway, sse, queue or broker")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	measure := run
	if o.kvm {
		measure = kvm
	}
	if err := measure(ctx, o); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		stop()
		os.Exit(1)
	}
}

type options struct {
	output, ephemeral, image, only string
	rounds                         int
	kvm                            bool
}

func envOr(name, otherwise string) string {
	if v := os.Getenv(name); v != "" {
		return v
	}
	return otherwise
}

// run measures everything, shows the table and writes the rows. It fails when a number does not hold its bar.
func run(ctx context.Context, o options) (err error) {
	data, err := os.MkdirTemp("", "eph-bench-")
	if err != nil {
		return fmt.Errorf("make a data directory: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(data)) }()
	if err := os.Chmod(data, 0o711); err != nil { // machines run as other users, who have to pass through
		return err
	}
	var rows []row
	for _, part := range []struct {
		name    string
		measure func(context.Context, options, string) ([]row, error)
	}{{"machines", machines}, {"runs", runs}, {"bursts", bursts}, {"gateway", gateways}, {"sse", streams}, {"queue", queueRows}, {"broker", brokers}} {
		if o.only != "" && o.only != part.name {
			continue
		}
		more, err := part.measure(ctx, o, data)
		if err != nil {
			return err
		}
		rows = append(rows, more...)
	}
	return conclude(o, rows)
}

// conclude shows the table and writes the rows, and fails when a number does not hold its bar.
func conclude(o options, rows []row) error {
	all := judge(rows)
	show(all)
	if err := save(o.output, all); err != nil {
		return err
	}
	for _, r := range all {
		if r.Holds != nil && !*r.Holds {
			return fmt.Errorf("%s does not hold its bar: %s", r.Name, r.Bar)
		}
	}
	return nil
}

// row is one measured number.
type row struct {
	Name     string   `json:"name"`
	Value    float64  `json:"value"` // the median
	Unit     string   `json:"unit"`
	Baseline string   `json:"baseline,omitempty"` // name of the row that Ratio compares with
	Ratio    *float64 `json:"ratio,omitempty"`    // Value / the baseline's
	Bar      string   `json:"bar,omitempty"`
	Holds    *bool    `json:"holds,omitempty"`
	Samples  int      `json:"samples"`
	P95      float64  `json:"p95"`

	most                  float64 // 0: no bar on the value
	mostRatio, leastRatio float64 // 0: no bar on the ratio
}

// judge fills in ratios and whether the bars hold.
func judge(rows []row) []row {
	value := map[string]float64{}
	for _, r := range rows {
		value[r.Name] = r.Value
	}
	for i := range rows {
		r := &rows[i]
		if base, ok := value[r.Baseline]; ok && base > 0 {
			ratio := r.Value / base
			r.Ratio = &ratio
		}
		holds := true
		if r.most > 0 {
			r.Bar = fmt.Sprintf("<= %g %s", r.most, r.Unit)
			holds = holds && r.Value <= r.most
		}
		if r.mostRatio > 0 {
			if r.Bar != "" {
				r.Bar += " and "
			}
			r.Bar += fmt.Sprintf("<= %.3g x %s", r.mostRatio, r.Baseline)
			holds = holds && r.Ratio != nil && *r.Ratio <= r.mostRatio
		}
		if r.leastRatio > 0 {
			if r.Bar != "" {
				r.Bar += " and "
			}
			r.Bar += fmt.Sprintf(">= %.3g x %s", r.leastRatio, r.Baseline)
			holds = holds && r.Ratio != nil && *r.Ratio >= r.leastRatio
		}
		if r.Bar != "" {
			r.Holds = &holds
		}
	}
	return rows
}

func show(rows []row) {
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "NAME\tMEDIAN\tP95\tUNIT\tN\tRATIO\tBAR\tHOLDS")
	for _, r := range rows {
		ratio, holds := "", ""
		if r.Ratio != nil {
			ratio = fmt.Sprintf("%.3f x %s", *r.Ratio, r.Baseline)
		}
		if r.Holds != nil {
			holds = map[bool]string{true: "yes", false: "NO"}[*r.Holds]
		}
		fmt.Fprintf(w, "%s\t%.4g\t%.4g\t%s\t%d\t%s\t%s\t%s\n", r.Name, r.Value, r.P95, r.Unit, r.Samples, ratio, r.Bar, holds)
	}
	_ = w.Flush()
}

func save(path string, rows []row) error {
	b, err := json.MarshalIndent(rows, "", "  ")
	if err != nil {
		return fmt.Errorf("encode the rows: %w", err)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return os.WriteFile(path, append(b, '\n'), 0o644)
}
