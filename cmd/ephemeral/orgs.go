package main

import (
	"context"
	"fmt"
	"io"
	"text/tabwriter"

	"github.com/google/uuid"
	"github.com/spf13/cobra"

	"github.com/ephemeral-run/ephemeral/run"
)

func orgsCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "orgs",
		Short: "Create organisations, give them credit, audit their accounts",
		Long:  "Works on the cell's Redis: EPHEMERAL_REDIS_URL, or the private one of a running \"ephemeral serve\" with the same EPHEMERAL_DATA_DIR.",
	}
	cmd.AddCommand(orgsCreateCommand(), orgsListCommand(), orgsCreditCommand(), orgsAuditCommand())
	return cmd
}

// withStore runs f with the cell's store open.
func withStore(cmd *cobra.Command, f func(ctx context.Context, s *run.Store) error) error {
	cfg, err := load()
	if err != nil {
		return err
	}
	store, err := openStore(cmd.Context(), cfg)
	if err != nil {
		return err
	}
	defer store.Close()
	return f(cmd.Context(), store)
}

func orgsCreateCommand() *cobra.Command {
	var output outputFormat
	var concurrency int
	cmd := &cobra.Command{
		Use:     "create NAME",
		Short:   "Create an organisation",
		Example: "  ephemeral orgs create acme",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return withStore(cmd, func(ctx context.Context, s *run.Store) error {
				org, err := s.CreateOrg(ctx, run.Org{Name: args[0], Concurrency: concurrency})
				if err != nil {
					return err
				}
				return output.print(cmd, org, func(w io.Writer) { fmt.Fprintln(w, org.ID) })
			})
		},
	}
	cmd.Flags().IntVar(&concurrency, "concurrency", 0, "runs at once (0: the default)")
	output.flag(cmd)
	return cmd
}

func orgsListCommand() *cobra.Command {
	var output outputFormat
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List the organisations with their balances",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return withStore(cmd, func(ctx context.Context, s *run.Store) error {
				orgs, err := s.Orgs(ctx)
				if err != nil {
					return err
				}
				type row struct {
					run.Org
					Account run.Account `json:"account"`
				}
				rows := make([]row, 0, len(orgs))
				for _, o := range orgs {
					a, err := s.Account(ctx, o.ID)
					if err != nil {
						return err
					}
					rows = append(rows, row{o, a})
				}
				return output.print(cmd, rows, func(w io.Writer) {
					tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
					fmt.Fprintln(tw, "ID\tNAME\tBALANCE\tHELD\tAVAILABLE")
					for _, r := range rows {
						fmt.Fprintf(tw, "%s\t%s\t%s\t%s\t%s\n", r.ID, r.Name, r.Account.Balance, r.Account.Held, r.Account.Available)
					}
					_ = tw.Flush()
				})
			})
		},
	}
	output.flag(cmd)
	return cmd
}

func orgsCreditCommand() *cobra.Command {
	var output outputFormat
	var ref string
	cmd := &cobra.Command{
		Use:     "credit ORG MICROS",
		Short:   "Add credit to an organisation's account, in micro-dollars",
		Long:    "Adds credit to an organisation's account, in micro-dollars: 1000000 are one US dollar. The same --ref is credited once, however often it is repeated.",
		Example: "  ephemeral orgs credit org_... 5000000 --ref invoice-17",
		Args:    cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			amount, err := parseMicros(args[1])
			if err != nil {
				return err
			}
			if ref == "" {
				ref = uuid.NewString()
			}
			return withStore(cmd, func(ctx context.Context, s *run.Store) error {
				account, err := s.Credit(ctx, args[0], amount, ref)
				if err != nil {
					return err
				}
				return output.print(cmd, account, func(w io.Writer) {
					fmt.Fprintf(w, "balance %s, held %s, available %s\n", account.Balance, account.Held, account.Available)
				})
			})
		},
	}
	cmd.Flags().StringVar(&ref, "ref", "", "reference that makes a repetition harmless (default: a new one)")
	output.flag(cmd)
	return cmd
}

func orgsAuditCommand() *cobra.Command {
	var output outputFormat
	cmd := &cobra.Command{
		Use:   "audit",
		Short: "Recompute every account and prove that no money is lost or made",
		Long: `Recomputes every account from its records and ledger, and checks conservation: deposits = balance + charges,
held = sum of open holds, and 0 <= charged <= reserved for every run. Exits with 1 and names the differences if it fails.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return withStore(cmd, func(ctx context.Context, s *run.Store) error {
				report, err := s.Audit(ctx)
				if err != nil {
					return err
				}
				if err := output.print(cmd, report, func(w io.Writer) { printAudit(w, report) }); err != nil {
					return err
				}
				if len(report.Differences) > 0 {
					return exitCode(1)
				}
				return nil
			})
		},
	}
	output.flag(cmd)
	return cmd
}

func printAudit(w io.Writer, r run.AuditReport) {
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(tw, "ORGANISATION\tDEPOSITS\tCHARGED\tBALANCE\tHELD\tAVAILABLE")
	for _, a := range r.Accounts {
		fmt.Fprintf(tw, "%s\t%s\t%s\t%s\t%s\t%s\n", a.Org, a.Deposits, a.Charged, a.Balance, a.Held, a.Available)
	}
	fmt.Fprintf(tw, "all (%d)\t%s\t%s\t%s\t%s\t%s\n", r.Orgs, r.Deposits, r.Charged, r.Balance, r.Held, r.Balance-r.Held)
	_ = tw.Flush()
	fmt.Fprintf(w, "%d runs, %d open holds of %s\n", r.Runs, r.OpenHolds, r.OpenHoldSum)
	if len(r.Differences) == 0 {
		fmt.Fprintln(w, "conserved: deposits = balance + charges; held = open holds")
		return
	}
	fmt.Fprintf(w, "NOT CONSERVED: %d differences\n", len(r.Differences))
	for _, d := range r.Differences {
		fmt.Fprintln(w, "  "+d)
	}
}

// print writes v as JSON or as text, as asked.
func (o *outputFormat) print(cmd *cobra.Command, v any, text func(io.Writer)) error {
	if o.json() {
		return printJSON(cmd.OutOrStdout(), v)
	}
	text(cmd.OutOrStdout())
	return nil
}
