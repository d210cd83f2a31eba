package main

import (
	"context"
	"encoding/csv"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"text/tabwriter"

	"github.com/google/uuid"
	"github.com/spf13/cobra"

	"github.com/ephemeral-run/ephemeral/run"
)

func orgsCommand() *cobra.Command {
	return group("orgs", "Create organisations, give them credit and limits, show and audit their accounts",
		"Works on the cell's Redis: EPHEMERAL_REDIS_URL, or the private one of a running \"ephemeral serve\" with the same EPHEMERAL_DATA_DIR.",
		orgsCreateCommand(), orgsListCommand(), orgsLimitCommand(), orgsRetainCommand(), orgsImagesCommand(), orgsCreditCommand(), orgsStatementCommand(), orgsAuditCommand())
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
		Args:    arguments,
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
		Args:  arguments,
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

func orgsLimitCommand() *cobra.Command {
	var output outputFormat
	var key string
	var limits run.Limits
	cmd := &cobra.Command{
		Use:   "limit ORG",
		Short: "Limit the runs of an organisation, or of one of its API keys",
		Long: `Sets how many runs an organisation, or with --key one of its API keys, may have at work at once and how many may wait.
A limit that is not given stays as it is. Without any, the limits are shown.`,
		Example: `  ephemeral orgs limit org_... --concurrency 50 --queue 20000
  ephemeral orgs limit org_... --key key_... --concurrency 2`,
		Args: arguments,
		RunE: func(cmd *cobra.Command, args []string) error {
			return withStore(cmd, func(ctx context.Context, s *run.Store) error {
				merged, err := currentLimits(ctx, s, args[0], key)
				if err != nil {
					return err
				}
				changed := false
				if cmd.Flags().Changed("concurrency") {
					merged.Concurrency, changed = limits.Concurrency, true
				}
				if cmd.Flags().Changed("queue") {
					merged.Queue, changed = limits.Queue, true
				}
				switch {
				case changed && key != "":
					err = s.LimitKey(ctx, key, merged)
				case changed:
					_, err = s.LimitOrg(ctx, args[0], merged)
				}
				if err != nil {
					return err
				}
				return output.print(cmd, merged, func(w io.Writer) {
					fmt.Fprintf(w, "concurrency %d, queue %d\n", merged.Concurrency, merged.Queue)
				})
			})
		},
	}
	cmd.Flags().StringVar(&key, "key", "", "id of the API key to limit")
	cmd.Flags().IntVar(&limits.Concurrency, "concurrency", 0, "runs at once (0: the default; for a key: no limit of its own)")
	cmd.Flags().IntVar(&limits.Queue, "queue", 0, "runs waiting (0: the default; for a key: no limit of its own)")
	output.flag(cmd)
	return cmd
}

// currentLimits are the limits of the organisation, or of its key.
func currentLimits(ctx context.Context, s *run.Store, org, key string) (run.Limits, error) {
	if key == "" {
		o, err := s.Org(ctx, org)
		return run.Limits{Concurrency: o.Concurrency, Queue: o.QueueLimit}, err
	}
	keys, err := s.Keys(ctx, org)
	if err != nil {
		return run.Limits{}, err
	}
	if !slices.ContainsFunc(keys, func(k run.Key) bool { return k.ID == key }) {
		return run.Limits{}, fmt.Errorf("key %s of organisation %s: %w", key, org, run.ErrNotFound)
	}
	return s.KeyLimits(ctx, key)
}

func orgsCreditCommand() *cobra.Command {
	var output outputFormat
	var ref string
	cmd := &cobra.Command{
		Use:     "credit ORG MICROS",
		Short:   "Add credit to an organisation's account, in micro-dollars",
		Long:    "Adds credit to an organisation's account, in micro-dollars: 1000000 are one US dollar. The same --ref is credited once, however often it is repeated.",
		Example: "  ephemeral orgs credit org_... 5000000 --ref invoice-17",
		Args:    arguments,
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

func orgsStatementCommand() *cobra.Command {
	format := "csv"
	var after int64
	var limit int
	cmd := &cobra.Command{
		Use:   "statement ORG",
		Short: "Write an account's statement: every deposit, correction and charge",
		Long: `Writes the ledger of an organisation's account as CSV (RFC 4180, with a header) or as a JSON array: deposits, corrections and
the charge of each settled run, in the order in which they were made, with the balance after each. Amounts are micro-dollars,
negative where the balance went down. Entries are numbered from 1 without gaps and never change: --after continues where an
earlier statement ended.`,
		Example: `  ephemeral orgs statement org_... > statement.csv
  ephemeral orgs statement org_... --after 1200 --limit 100 --output json`,
		Args: arguments,
		RunE: func(cmd *cobra.Command, args []string) error {
			if after < 0 || limit < 0 {
				return fmt.Errorf("--after and --limit must not be negative")
			}
			write, done, err := statementWriter(cmd.OutOrStdout(), format)
			if err != nil {
				return err
			}
			return withStore(cmd, func(ctx context.Context, s *run.Store) error {
				if err := copyStatement(ctx, s, args[0], after, limit, write); err != nil {
					return err
				}
				return done()
			})
		},
	}
	cmd.Flags().StringVarP(&format, "output", "o", format, "csv or json")
	cmd.Flags().Int64Var(&after, "after", 0, "number of the entry to start behind")
	cmd.Flags().IntVar(&limit, "limit", 0, "most entries to write (0: all)")
	return cmd
}

// copyStatement writes the entries after the given one, page by page: a long ledger is never in memory.
func copyStatement(ctx context.Context, s *run.Store, org string, after int64, limit int, write func(run.Entry) error) error {
	const page = 1000
	for left := limit; limit == 0 || left > 0; left -= page {
		want := page
		if limit > 0 {
			want = min(left, page)
		}
		entries, err := s.Statement(ctx, org, after, want)
		if err != nil {
			return err
		}
		for _, e := range entries {
			if err := write(e); err != nil {
				return fmt.Errorf("write the statement: %w", err)
			}
			after = e.Number
		}
		if len(entries) < want {
			return nil
		}
	}
	return nil
}

// statementWriter writes entries in the format; done ends the document.
func statementWriter(w io.Writer, format string) (write func(run.Entry) error, done func() error, err error) {
	switch format {
	case "csv":
		out := csv.NewWriter(w)
		if err := out.Write(run.EntryColumns()); err != nil {
			return nil, nil, err
		}
		write = func(e run.Entry) error { return out.Write(e.Row()) }
		return write, func() error { out.Flush(); return out.Error() }, nil
	case "json":
		before := "[\n  "
		write = func(e run.Entry) error {
			line, err := json.Marshal(e)
			if err != nil {
				return err
			}
			_, err = fmt.Fprintf(w, "%s%s", before, line)
			before = ",\n  "
			return err
		}
		return write, func() error {
			if before == "[\n  " {
				_, err := fmt.Fprintln(w, "[]")
				return err
			}
			_, err := fmt.Fprint(w, "\n]\n")
			return err
		}, nil
	}
	return nil, nil, fmt.Errorf("--output is %q: it must be csv or json", format)
}

func orgsAuditCommand() *cobra.Command {
	var output outputFormat
	cmd := &cobra.Command{
		Use:   "audit",
		Short: "Recompute every account and prove that no money is lost or made",
		Long: `Recomputes every account from its records and ledger, and checks conservation: deposits = balance + charges,
held = sum of open holds, and 0 <= charged <= reserved for every run. Exits with 1 and names the differences if it fails; the
first of an account is the first entry of its ledger that leaves another balance than the entries up to it add up to.`,
		Args: arguments,
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
	fmt.Fprintf(w, "NOT CONSERVED: %d differences, the first:\n", len(r.Differences))
	for _, d := range r.Differences {
		fmt.Fprintln(w, "  "+d)
	}
}

// confirm writes v as JSON where that is asked; as text, a command that succeeds says nothing.
func (o *outputFormat) confirm(cmd *cobra.Command, v any) error {
	return o.print(cmd, v, func(io.Writer) {})
}

// print writes v as JSON or as text, as asked.
func (o *outputFormat) print(cmd *cobra.Command, v any, text func(io.Writer)) error {
	if o.json() {
		return printJSON(cmd.OutOrStdout(), v)
	}
	text(cmd.OutOrStdout())
	return nil
}
