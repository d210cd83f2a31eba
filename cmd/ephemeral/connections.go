package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/ephemeral-run/ephemeral/run"
	"github.com/ephemeral-run/ephemeral/run/connection"
)

func connectionsCommand() *cobra.Command {
	return group("connections", "Configure the upstreams that an organisation's runs may reach",
		`A connection is a named upstream with a credential that runs never see. Works on the cell's Redis: EPHEMERAL_REDIS_URL, or
the private one of a running "ephemeral serve" with the same EPHEMERAL_DATA_DIR. Credentials are sealed with the key of
EPHEMERAL_SEALING_KEY, EPHEMERAL_SEALING_KEY_FILE or the data directory.`,
		connectionsPutCommand(), connectionsListCommand(), connectionsShowCommand(), connectionsDeleteCommand(), connectionsResealCommand(),
		connectionsKeyCommand())
}

// withKeyring runs f with the cell's store and the keys that seal credentials.
func withKeyring(cmd *cobra.Command, f func(ctx context.Context, s *run.Store, ring *connection.Keyring) error) error {
	cfg, err := load()
	if err != nil {
		return err
	}
	ring, err := cfg.keyring(false)
	if err != nil {
		return err
	}
	return withStore(cmd, func(ctx context.Context, s *run.Store) error { return f(ctx, s, ring) })
}

// putFlags are the flags of a connection's definition.
type putFlags struct {
	connection.Connection
	kind, auth, credentialFile string
}

func connectionsPutCommand() *cobra.Command {
	var output outputFormat
	var f putFlags
	cmd := &cobra.Command{
		Use:   "put ORG NAME",
		Short: "Make or replace a connection",
		Long: `Makes a connection, or replaces its whole definition. The credential is read from --credential-file, "-" is standard input,
and never from the command line, which others can see. Without it the credential that is there stays, as long as kind, base
URL and auth stay the same.`,
		Example: `  ephemeral connections put org_... billing --base-url https://api.example.com/v1 --auth bearer --path '/invoices/**' \
      --credential-file token
  ephemeral connections put org_... warehouse --kind postgres --base-url postgres://reader@db.example.com/shop --auth basic \
      --credential-file -`,
		Args: cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			f.Name = args[1]
			c, credential, err := f.read(cmd)
			if err != nil {
				return err
			}
			return withKeyring(cmd, func(ctx context.Context, s *run.Store, ring *connection.Keyring) error {
				stored, err := s.UpdateConnection(ctx, args[0], c.Name, func(old *connection.Sealed) (connection.Sealed, error) {
					return ring.Update(args[0], old, c, credential)
				})
				if errors.Is(err, connection.ErrNoKey) {
					return fmt.Errorf("%w: set EPHEMERAL_SEALING_KEY or EPHEMERAL_SEALING_KEY_FILE (\"ephemeral connections key\" makes one)", err)
				}
				if err != nil {
					return err
				}
				return output.print(cmd, stored.Connection, func(w io.Writer) { printConnection(w, stored.Connection) })
			})
		},
	}
	f.define(cmd)
	output.flag(cmd)
	return cmd
}

func (f *putFlags) define(cmd *cobra.Command) {
	flags := cmd.Flags()
	flags.StringVar(&f.kind, "kind", string(connection.HTTP), "http or postgres")
	flags.StringVar(&f.BaseURL, "base-url", "", "http(s)://host[:port][/path], or postgres://user@host[:port]/database[?sslmode=verify-full]")
	flags.StringVar(&f.auth, "auth", string(connection.AuthNone), "none, bearer, basic:USER, header:NAME or query:NAME; with postgres basic (the credential is the password) or none")
	flags.StringVar(&f.credentialFile, "credential-file", "", "file with the credential; - is standard input")
	flags.StringVar(&f.Description, "description", "", "what it is, for the model")
	flags.StringSliceVar(&f.Methods, "method", nil, "allowed methods (default GET,HEAD)")
	flags.StringSliceVar(&f.Paths, "path", nil, "allowed paths below the base URL; * is any one segment, ** at the end any rest (default all)")
	flags.StringSliceVar(&f.RequestHeaders, "request-header", nil, "headers that are passed on beside the harmless ones")
	flags.StringSliceVar(&f.ResponseHeaders, "response-header", nil, "headers that are passed back beside the harmless ones")
	flags.Int64Var(&f.MaxRequestBytes, "max-request-bytes", 0, "largest request body (default 1 MiB)")
	flags.Int64Var(&f.MaxResponseBytes, "max-response-bytes", 0, "largest answer (default 4 MiB)")
	flags.IntVar(&f.MaxRows, "max-rows", 0, "most rows of one statement (default 1000)")
	flags.IntVar(&f.TimeoutSeconds, "timeout", 0, "longest time of one call in seconds (default 30)")
	flags.IntVar(&f.RatePerMinute, "rate", 0, "calls a minute, of all runs on one node (default 600)")
}

// read makes a connection of the flags, and reads the credential; nil: none is given.
func (f *putFlags) read(cmd *cobra.Command) (connection.Connection, *string, error) {
	c := f.Connection
	c.Kind = connection.Kind(f.kind)
	kind, word, _ := strings.Cut(f.auth, ":")
	c.Auth = connection.Auth{Type: connection.AuthType(kind)}
	if c.Auth.Type == connection.AuthBasic {
		c.Auth.User = word
	} else {
		c.Auth.Name = word
	}
	c, err := c.Check()
	if err != nil || f.credentialFile == "" {
		return c, nil, err
	}
	var from io.Reader = cmd.InOrStdin()
	if f.credentialFile != "-" {
		file, err := os.Open(f.credentialFile)
		if err != nil {
			return c, nil, fmt.Errorf("read the credential: %w", err)
		}
		defer file.Close()
		from = file
	}
	data, err := io.ReadAll(io.LimitReader(from, connection.MaxCredential+2))
	if err != nil {
		return c, nil, fmt.Errorf("read the credential: %w", err)
	}
	credential := string(bytes.TrimRight(data, "\r\n"))
	return c, &credential, c.CheckCredential(credential)
}

func printConnection(w io.Writer, c connection.Connection) {
	auth := string(c.Auth.Type)
	if word := c.Auth.Name + c.Auth.User; word != "" {
		auth += ":" + word
	}
	fmt.Fprintf(w, "%s (%s) %s\nauth %s, credential %s\n", c.Name, c.Kind, c.BaseURL, auth, map[bool]string{true: "sealed", false: "none"}[c.HasCredential])
	if c.Kind == connection.HTTP {
		fmt.Fprintf(w, "methods %s, paths %s\n", strings.Join(c.Methods, " "), strings.Join(c.Paths, " "))
	}
	fmt.Fprintf(w, "at most %d bytes in %d s, %d calls a minute\n", c.MaxResponseBytes, c.TimeoutSeconds, c.RatePerMinute)
}

func connectionsListCommand() *cobra.Command {
	var output outputFormat
	cmd := &cobra.Command{
		Use: "list ORG", Short: "List an organisation's connections", Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return withStore(cmd, func(ctx context.Context, s *run.Store) error {
				sealed, err := s.Connections(ctx, args[0])
				if err != nil {
					return err
				}
				all := make([]connection.Connection, 0, len(sealed))
				for _, c := range sealed {
					all = append(all, c.Connection)
				}
				return output.print(cmd, all, func(w io.Writer) {
					tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
					fmt.Fprintln(tw, "NAME\tKIND\tBASE URL\tAUTH\tMETHODS\tPATHS")
					for _, c := range all {
						fmt.Fprintf(tw, "%s\t%s\t%s\t%s\t%s\t%s\n", c.Name, c.Kind, c.BaseURL, c.Auth.Type, strings.Join(c.Methods, ","), strings.Join(c.Paths, ","))
					}
					_ = tw.Flush()
				})
			})
		},
	}
	output.flag(cmd)
	return cmd
}

func connectionsShowCommand() *cobra.Command {
	var output outputFormat
	cmd := &cobra.Command{
		Use: "show ORG NAME", Short: "Show a connection, without its credential", Args: cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			return withStore(cmd, func(ctx context.Context, s *run.Store) error {
				c, err := s.Connection(ctx, args[0], args[1])
				if err != nil {
					return err
				}
				return output.print(cmd, c.Connection, func(w io.Writer) { printConnection(w, c.Connection) })
			})
		},
	}
	output.flag(cmd)
	return cmd
}

func connectionsDeleteCommand() *cobra.Command {
	var output outputFormat
	cmd := &cobra.Command{
		Use: "delete ORG NAME", Short: "Delete a connection and its credential; runs cannot use it any more", Args: cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			return withStore(cmd, func(ctx context.Context, s *run.Store) error {
				if err := s.DeleteConnection(ctx, args[0], args[1]); err != nil {
					return err
				}
				return output.confirm(cmd, map[string]string{"organisation": args[0], "deleted": args[1]})
			})
		},
	}
	output.flag(cmd)
	return cmd
}

func connectionsKeyCommand() *cobra.Command {
	var output outputFormat
	cmd := &cobra.Command{
		Use: "key", Short: "Make a key that seals credentials, and print it", Args: cobra.NoArgs,
		Long: `Makes a key for EPHEMERAL_SEALING_KEY or a line of EPHEMERAL_SEALING_KEY_FILE and prints it; it is stored nowhere. To rotate,
put the new key in front of the old one on every gateway and node, restart them, run "ephemeral connections reseal", and
take the old key away.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			key := connection.NewKey()
			return output.print(cmd, map[string]string{"key": key}, func(w io.Writer) { fmt.Fprintln(w, key) })
		},
	}
	output.flag(cmd)
	return cmd
}

func connectionsResealCommand() *cobra.Command {
	var output outputFormat
	cmd := &cobra.Command{
		Use: "reseal", Short: "Seal every credential with the newest key", Args: cobra.NoArgs,
		Long: "Opens the credential of every connection of every organisation and seals it with the first of the configured keys. Afterwards older keys are needed no more. It may be repeated.",
		RunE: func(cmd *cobra.Command, _ []string) error {
			return withKeyring(cmd, func(ctx context.Context, s *run.Store, ring *connection.Keyring) error {
				count, err := reseal(ctx, s, ring)
				return errors.Join(err, output.print(cmd, map[string]int{"sealed": count}, func(w io.Writer) {
					fmt.Fprintf(w, "%d credentials sealed anew\n", count)
				}))
			})
		},
	}
	output.flag(cmd)
	return cmd
}

// reseal goes on after a connection that cannot be opened, and returns every error.
func reseal(ctx context.Context, s *run.Store, ring *connection.Keyring) (count int, err error) {
	orgs, err := s.Orgs(ctx)
	if err != nil {
		return 0, err
	}
	var failed error
	for _, org := range orgs {
		all, err := s.Connections(ctx, org.ID)
		if err != nil {
			return count, err
		}
		for _, c := range all {
			if ring.Current(c) {
				continue
			}
			_, err := s.UpdateConnection(ctx, org.ID, c.Name, func(old *connection.Sealed) (connection.Sealed, error) {
				if old == nil {
					return connection.Sealed{}, fmt.Errorf("deleted meanwhile: %w", run.ErrNotFound)
				}
				return ring.Update(org.ID, old, old.Connection, nil)
			})
			if err != nil {
				failed = errors.Join(failed, fmt.Errorf("connection %s of %s: %w", c.Name, org.ID, err))
				continue
			}
			count++
		}
	}
	return count, failed
}
