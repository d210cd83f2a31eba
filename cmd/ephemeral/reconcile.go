package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/ephemeral-run/ephemeral/node/guest"
	"github.com/ephemeral-run/ephemeral/run/tracing"
	"github.com/ephemeral-run/ephemeral/vmm/network"
	"github.com/ephemeral-run/ephemeral/vmm/provision"
)

// reconciled is what "node reconcile" found, removed, and left.
type reconciled struct {
	Node    string            `json:"node"`
	Removed provision.Residue `json:"removed"`
	Left    provision.Residue `json:"left"`
	Runs    *recoveredRuns    `json:"runs,omitempty"` // nil: the store was not asked
}

// recoveredRuns are the node's runs that were given back or ended.
type recoveredRuns struct {
	Requeued int `json:"requeued"`
	Ended    int `json:"ended"`
}

func nodeReconcileCommand() *cobra.Command {
	var output outputFormat
	cmd := &cobra.Command{
		Use:   "reconcile",
		Short: "Remove what an earlier life of this node left on the host, and count it",
		Long: `Removes what an earlier life of this node left: processes, taps, namespaces, directories, cgroups, half-built templates. A
node does the same at its start; this is for one that will not start again. With EPHEMERAL_REDIS_URL set it also gives back or
ends the runs that the node held. It is refused while the node runs. It ends with 1 when something is left.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if os.Geteuid() != 0 {
				return errors.New("this needs root: it removes processes, taps and namespaces of machines")
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), reconcileTime)
			defer cancel()
			s, err := load()
			if err != nil {
				return err
			}
			done, err := reconcileNode(ctx, s)
			if errors.Is(err, network.ErrInUse) {
				return fmt.Errorf("the node runs: it reconciled at its start: %w", err)
			}
			if err != nil {
				return err
			}
			if err := output.print(cmd, done, func(w io.Writer) { printReconciled(w, done) }); err != nil {
				return err
			}
			if done.Left.Total() > 0 {
				return exitCode(1)
			}
			return nil
		},
	}
	output.flag(cmd)
	return cmd
}

// reconcileNode removes, counts, and looks once more, when nothing of the node's own is open any longer.
func reconcileNode(ctx context.Context, s settings) (done reconciled, err error) {
	done.Removed, done.Node, err = removeLeft(ctx, s)
	if err != nil {
		return done, err
	}
	if done.Left, err = provision.Survey(s.Provision); err != nil {
		return done, err
	}
	if s.Run.RedisURL == "" {
		return done, nil
	}
	c := &cell{settings: s, log: slog.New(s.Log.handler(os.Stderr))}
	if c.traces, err = tracing.Open(ctx, s.Tracing, version, c.log); err != nil {
		return done, fmt.Errorf("settings: %w", err)
	}
	defer c.closeTraces()
	store, err := openStore(ctx, s, c.options()...)
	if err != nil {
		return done, err
	}
	defer func() { err = errors.Join(err, store.Close()) }()
	requeued, ended, err := store.Reap(ctx, done.Node)
	done.Runs = &recoveredRuns{Requeued: requeued, Ended: ended}
	return done, err
}

// removeLeft opens the node's parts as a start would, which tells whether it runs, and removes what is left.
func removeLeft(ctx context.Context, s settings) (removed provision.Residue, node string, err error) {
	driver, err := openDriver(s, slog.New(s.Log.handler(os.Stderr)))
	if err != nil {
		return removed, "", fmt.Errorf("open the hypervisor: %w", err)
	}
	defer func() { err = errors.Join(err, driver.Close()) }()
	parts, err := provision.New(ctx, s.Provision, driver, provision.Agent{Probe: guest.Probe, Warm: guest.Warm})
	if err != nil {
		return removed, "", fmt.Errorf("open the host's parts: %w", err)
	}
	defer func() { err = errors.Join(err, parts.Close()) }()
	removed, err = parts.Reconcile(ctx)
	return removed, parts.Node(), err
}

func printReconciled(w io.Writer, r reconciled) {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintf(t, "kind\tremoved\tleft\n")
	for _, k := range []struct {
		name          string
		removed, left int
	}{
		{"processes", r.Removed.Processes, r.Left.Processes}, {"taps", r.Removed.Taps, r.Left.Taps},
		{"namespaces", r.Removed.Namespaces, r.Left.Namespaces}, {"directories", r.Removed.Dirs, r.Left.Dirs},
		{"cgroups", r.Removed.Cgroups, r.Left.Cgroups}, {"templates", r.Removed.Templates, r.Left.Templates},
	} {
		fmt.Fprintf(t, "%s\t%d\t%d\n", k.name, k.removed, k.left)
	}
	_ = t.Flush() // w is the command's output, whose failure print reports
	if r.Runs != nil {
		fmt.Fprintf(w, "runs of node %s: %d requeued, %d ended\n", r.Node, r.Runs.Requeued, r.Runs.Ended)
	}
}
