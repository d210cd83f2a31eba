package main

import (
	"context"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/ephemeral-run/ephemeral/run/pools"
)

func poolShowCommand() *cobra.Command {
	var output outputFormat
	cmd := &cobra.Command{
		Use:   "show [NAME]",
		Short: "Show the pools on every node, or one pool with its settings and its last decisions",
		Example: `  ephemeral pool show
  ephemeral pool show base-1x512
  ephemeral pool show base-1x512 --output json`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return withPools(cmd, func(ctx context.Context, s *pools.Store) error {
				if len(args) == 1 {
					p, err := s.Get(ctx, args[0])
					if err != nil {
						return err
					}
					return output.print(cmd, p, func(w io.Writer) { writePool(w, p) })
				}
				all, err := s.List(ctx)
				if err != nil {
					return err
				}
				return output.print(cmd, all, func(w io.Writer) { writePools(w, all) })
			})
		},
	}
	output.flag(cmd)
	return cmd
}

func poolTopCommand() *cobra.Command {
	var output outputFormat
	var every time.Duration
	var times int
	cmd := &cobra.Command{
		Use:   "top",
		Short: "Watch the pools on every node",
		Example: `  ephemeral pool top
  ephemeral pool top --interval 5s --output json    # one JSON document each time`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if every < 100*time.Millisecond {
				return fmt.Errorf("--interval %s: at least 100ms", every)
			}
			return withPools(cmd, func(ctx context.Context, s *pools.Store) error {
				last := map[string]pools.Report{}
				for n := 1; ; n++ {
					all, err := s.List(ctx)
					if err != nil {
						return err
					}
					err = output.print(cmd, all, func(w io.Writer) {
						fmt.Fprint(w, "\x1b[H\x1b[2J") // the upper left corner, and clear
						fmt.Fprintf(w, "%s\n\n", time.Now().Format(time.TimeOnly))
						writeTop(w, all, last)
					})
					if err != nil || n == times {
						return err
					}
					select {
					case <-time.After(every):
					case <-ctx.Done():
						return nil
					}
				}
			})
		},
	}
	cmd.Flags().DurationVar(&every, "interval", 2*time.Second, "time between two looks")
	cmd.Flags().IntVar(&times, "times", 0, "looks, 0: until interrupted")
	output.flag(cmd)
	return cmd
}

// writePools writes one line for each pool on each node.
func writePools(w io.Writer, all []pools.Pool) {
	if len(all) == 0 {
		fmt.Fprintln(w, "no node of this cell has reported a pool")
		return
	}
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "POOL\tNODE\tSTATE\tREADY\tTARGET\tLEASED\tREFILLING\tWAITING\tMOST\tREASON")
	for _, p := range all {
		if len(p.Nodes) == 0 {
			fmt.Fprintf(table, "%s\t-\tgone\t\t\t\t\t\t\tno node has this pool now\n", p.Name)
		}
		for _, n := range p.Nodes {
			fmt.Fprintf(table, "%s\t%s\t%s\t%d\t%d\t%d\t%d\t%d\t%d\t%s\n", p.Name, n.Node, n.State, n.Ready, n.Target, n.Leased, n.Refilling, n.Waiting,
				n.Settings.MaxMachines, oneLine(why(n)))
		}
	}
	_ = table.Flush() // a screen that is gone cannot be told so
}

// why is the reason that matters most.
func why(n pools.Report) string {
	switch {
	case n.Error != "":
		return "does not follow its policy: " + n.Error
	case n.Circuit != "closed":
		return "circuit " + n.Circuit + ": " + n.CircuitReason
	case n.Admission != "":
		return n.Admission
	}
	return n.Reason
}

// writeTop writes what happened on each node since last, which it replaces.
func writeTop(w io.Writer, all []pools.Pool, last map[string]pools.Report) {
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "POOL\tNODE\tSTATE\tREADY\tTARGET\tLEASED\tREFILLING\tDESTROYING\tWAITING\tCLAIMS/S\tMISSES\tMEAN WAIT\tOLDEST\tREASON")
	for _, p := range all {
		for _, n := range p.Nodes {
			rate, misses, wait := "-", "-", "-"
			before, ok := last[p.Name+" "+n.Node]
			if d := n.At.Sub(before.At).Seconds(); ok && d > 0 && n.Claims >= before.Claims {
				claims := n.Claims - before.Claims
				rate = fmt.Sprintf("%.2f", float64(claims)/d)
				if claims > 0 {
					misses = fmt.Sprintf("%.1f%%", 100*float64(n.Misses-before.Misses)/float64(claims))
					wait = seconds((n.WaitSeconds - before.WaitSeconds) / float64(claims))
				}
			}
			last[p.Name+" "+n.Node] = n
			fmt.Fprintf(table, "%s\t%s\t%s\t%d\t%d\t%d\t%d\t%d\t%d\t%s\t%s\t%s\t%s\t%s\n", p.Name, n.Node, n.State, n.Ready, n.Target, n.Leased, n.Refilling,
				n.Destroying, n.Waiting, rate, misses, wait, seconds(n.OldestReadySeconds), oneLine(why(n)))
		}
	}
	_ = table.Flush()
}

func seconds(s float64) string {
	return time.Duration(s * float64(time.Second)).Round(time.Millisecond).String()
}

// writePool writes all about one pool.
func writePool(w io.Writer, p pools.Pool) {
	fmt.Fprintf(w, "%s: %d ready (target %d), %d leased, %d refilling, %d waiting\n", p.Name, p.Ready, p.Target, p.Leased, p.Refilling, p.Waiting)
	fmt.Fprintf(w, "policy: %s\n", policyLine(p.Policy))
	for _, n := range p.Nodes {
		s := n.Settings
		fmt.Fprintf(w, "\nnode %s: %s, follows revision %d\n", n.Node, n.State, n.Revision)
		table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
		line := func(name, format string, args ...any) {
			fmt.Fprintf(table, "  "+name+"\t"+strings.TrimRight(format, "\n")+"\n", args...)
		}
		line("machines", "%d ready, %d leased, %d refilling, %d destroying; %d claims wait", n.Ready, n.Leased, n.Refilling, n.Destroying, n.Waiting)
		line("target", "%d. %s", n.Target, oneLine(n.Reason))
		line("settings", "%d to %d ready, %d machines at most, %d made at once, age %s, target miss rate %g",
			s.MinReady, s.MaxReady, s.MaxMachines, s.RefillConcurrency, seconds(s.MaxAgeSeconds), s.TargetMissRate)
		line("shape", "%d vCPU, %d MiB, rests %s, image %s", n.VCPUs, n.MemoryMiB, n.Rest, n.Image)
		line("circuit", "%s %s", n.Circuit, oneLine(n.CircuitReason))
		line("claims", "%d, of which %d found none ready; %d machines made, %d failed", n.Claims, n.Misses, n.Made, n.MakeFailures)
		if n.Admission != "" {
			line("put off", "%s", oneLine(n.Admission))
		}
		if n.Error != "" {
			line("policy", "not followed: %s", oneLine(n.Error))
		}
		for _, d := range n.Decisions {
			line(d.At.Local().Format(time.TimeOnly), "%s: %s", d.What, oneLine(d.Reason))
		}
		_ = table.Flush()
	}
}

// policyLine is what an operator has set.
func policyLine(d pools.Desired) string {
	if d.Revision == 0 {
		return "none set, each node follows its own configuration"
	}
	parts := []string{fmt.Sprintf("revision %d of %s", d.Revision, d.SetAt.Local().Format(time.DateTime))}
	whole := func(name string, v *int) {
		if v != nil {
			parts = append(parts, fmt.Sprintf("%s %d", name, *v))
		}
	}
	whole("min-ready", d.MinReady)
	whole("max-ready", d.MaxReady)
	whole("max-machines", d.MaxMachines)
	whole("refill-concurrency", d.RefillConcurrency)
	if d.MaxAgeSeconds != nil {
		parts = append(parts, "max-age "+seconds(*d.MaxAgeSeconds))
	}
	if d.TargetMissRate != nil {
		parts = append(parts, fmt.Sprintf("scale-to %g", *d.TargetMissRate))
	}
	if d.Drained {
		parts = append(parts, "drained")
	}
	if len(d.DrainedNodes) > 0 {
		parts = append(parts, "drained on "+strings.Join(d.DrainedNodes, ", "))
	}
	return strings.Join(parts, ", ")
}
