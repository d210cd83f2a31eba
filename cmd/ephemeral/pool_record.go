package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/ephemeral-run/ephemeral/run/pools"
	"github.com/ephemeral-run/ephemeral/vmm/pool/trace"
	"github.com/ephemeral-run/ephemeral/vmm/pool/workload"
)

// recorded is what the command prints as JSON.
type recorded struct {
	Pool     string    `json:"pool"`
	Arrivals int       `json:"arrivals"`
	From     time.Time `json:"from,omitzero"`
	To       time.Time `json:"to,omitzero"`
	File     string    `json:"file"`
}

func poolRecordCommand() *cobra.Command {
	var output outputFormat
	var since time.Duration
	var path string
	cmd := &cobra.Command{
		Use:   "record [NAME]",
		Short: "Write a pool's history as a trace for simulate",
		Long: `Writes when runs were queued and how long each had its machine, as a trace for "ephemeral pool simulate --trace". The cell keeps the
last week of it, the last 400,000 runs at the most. Runs that are still waiting or at work are not in it.`,
		Example: `  ephemeral pool record --since 24h --file arrivals.csv
  ephemeral pool simulate --trace arrivals.csv --want-misses 1%`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return withPools(cmd, func(ctx context.Context, s *pools.Store) error {
				p, err := thePool(ctx, s, args)
				if err != nil {
					return err
				}
				from := time.Time{}
				if since > 0 {
					from = time.Now().Add(-since)
				}
				uses, err := s.History(ctx, p.Name, from)
				if err != nil {
					return err
				}
				if len(uses) == 0 {
					return fmt.Errorf("pool %s has no history yet", p.Name)
				}
				t := traceOf(uses)
				if path == "-" {
					if output.json() {
						return errors.New("--output json needs --file: standard output has the trace")
					}
					return trace.Write(cmd.OutOrStdout(), t)
				}
				file, err := os.Create(path)
				if err != nil {
					return fmt.Errorf("write the trace: %w", err)
				}
				if err := errors.Join(trace.Write(file, t), file.Close()); err != nil {
					return fmt.Errorf("write the trace: %w", err)
				}
				out := recorded{Pool: p.Name, Arrivals: len(uses), From: uses[0].Queued, To: uses[len(uses)-1].Queued, File: path}
				return output.print(cmd, out, func(w io.Writer) {
					fmt.Fprintf(w, "%s: %d arrivals from %s to %s\n", path, out.Arrivals, out.From.Format(time.RFC3339), out.To.Format(time.RFC3339))
				})
			})
		},
	}
	cmd.Flags().DurationVar(&since, "since", 0, "only runs queued in this last time; 0: all that is kept")
	cmd.Flags().StringVar(&path, "file", "-", "file to write; -: standard output")
	output.flag(cmd)
	return cmd
}

// traceOf is a history as a trace.
func traceOf(uses []pools.Use) trace.Trace {
	t := trace.Trace{Service: true}
	for _, u := range uses {
		t.Arrivals = append(t.Arrivals, workload.Arrival{At: u.Queued.Sub(uses[0].Queued), Service: u.Service})
	}
	return t
}
