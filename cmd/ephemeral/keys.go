package main

import (
	"context"
	"fmt"
	"io"
	"strconv"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/ephemeral-run/ephemeral/run"
)

func keysCommand() *cobra.Command {
	return group("keys", "Create, list and revoke API keys",
		"Works on the cell's Redis: EPHEMERAL_REDIS_URL, or the private one of a running \"ephemeral serve\" with the same EPHEMERAL_DATA_DIR.",
		keysCreateCommand(), keysListCommand(), keysRevokeCommand())
}

func keysListCommand() *cobra.Command {
	var output outputFormat
	var org string
	cmd := &cobra.Command{
		Use:     "list",
		Short:   "List an organisation's keys, without their secrets; without --org the admin keys",
		Example: "  ephemeral keys list --org org_default",
		Args:    arguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return withStore(cmd, func(ctx context.Context, s *run.Store) error {
				keys, err := s.Keys(ctx, org)
				if err != nil {
					return err
				}
				return output.print(cmd, keys, func(w io.Writer) {
					tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
					fmt.Fprintln(tw, "ID\tROLE\tNAME\tCREATED\tEXPIRES\tREVOKED")
					for _, k := range keys {
						fmt.Fprintf(tw, "%s\t%s\t%s\t%s\t%s\t%s\n", k.ID, k.Role, k.Name, dateTime(k.CreatedAt), dateTime(k.ExpiresAt), dateTime(k.RevokedAt))
					}
					_ = tw.Flush()
				})
			})
		},
	}
	cmd.Flags().StringVar(&org, "org", "", "organisation whose keys to list")
	output.flag(cmd)
	return cmd
}

// dateTime writes a time for people; a zero one as nothing.
func dateTime(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return t.Format(time.DateTime)
}

func keysCreateCommand() *cobra.Command {
	var output outputFormat
	var org, name, member string
	var admin bool
	var life time.Duration
	cmd := &cobra.Command{
		Use:   "create",
		Short: "Create an API key and show its secret, once",
		Example: `  ephemeral keys create --org org_... --name laptop
  ephemeral keys create --org org_... --name ci --expires 720h
  ephemeral keys create --admin`,
		Args: arguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if admin == (org != "") {
				return fmt.Errorf("a key needs either --org ORG (a member key) or --admin")
			}
			if life < 0 {
				return fmt.Errorf("--expires %s: it must be in the future", life)
			}
			options := []run.KeyOption{run.OfMember(member)}
			if life > 0 {
				options = append(options, run.ExpiresAt(time.Now().Add(life)))
			}
			role := run.Member
			if admin {
				role = run.Admin
			}
			return withStore(cmd, func(ctx context.Context, s *run.Store) error {
				key, secret, err := s.CreateKey(ctx, org, name, role, options...)
				if err != nil {
					return err
				}
				shown := struct {
					run.Key
					Secret string `json:"secret"`
				}{key, secret}
				fmt.Fprintf(cmd.ErrOrStderr(), "key %s; its secret is shown this once:\n", key.ID)
				return output.print(cmd, shown, func(w io.Writer) { fmt.Fprintln(w, secret) })
			})
		},
	}
	cmd.Flags().StringVar(&org, "org", "", "organisation the key belongs to")
	cmd.Flags().StringVar(&name, "name", "", "what the key is for")
	cmd.Flags().StringVar(&member, "member", "", "member of the organisation whose key it is")
	cmd.Flags().DurationVar(&life, "expires", 0, "how long the key can be used (0: for ever)")
	cmd.Flags().BoolVar(&admin, "admin", false, "an operator's key, of no organisation")
	output.flag(cmd)
	return cmd
}

func keysRevokeCommand() *cobra.Command {
	var output outputFormat
	cmd := &cobra.Command{
		Use:   "revoke KEY-ID",
		Short: "Revoke an API key at once",
		Args:  arguments,
		RunE: func(cmd *cobra.Command, args []string) error {
			return withStore(cmd, func(ctx context.Context, s *run.Store) error {
				if err := s.RevokeKey(ctx, args[0]); err != nil {
					return err
				}
				return output.confirm(cmd, map[string]string{"revoked": args[0]})
			})
		},
	}
	output.flag(cmd)
	return cmd
}

func parseMicros(s string) (run.Micros, error) {
	v, err := strconv.ParseInt(s, 10, 64)
	if err != nil || v <= 0 {
		return 0, fmt.Errorf("amount %q: it must be a positive whole number of micro-dollars (1000000 are one dollar)", s)
	}
	return run.Micros(v), nil
}
