package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/ephemeral-run/ephemeral/client"
	"github.com/ephemeral-run/ephemeral/run"
)

// clientConfig says which server the client commands talk to.
type clientConfig struct {
	URL    string `env:"EPHEMERAL_URL" envDefault:"http://127.0.0.1:8080" help:"server that the client commands talk to"`
	APIKey string `env:"EPHEMERAL_API_KEY" secret:"true" help:"API key that the client commands use"`
}

// maxRequest bounds a request file, in bytes; the server's own limit is EPHEMERAL_BODY_LIMIT.
const maxRequest = 64 << 20

func openClient() (*client.Client, error) {
	s, err := load()
	if err != nil {
		return nil, err
	}
	if s.Client.APIKey == "" {
		return nil, errors.New("EPHEMERAL_API_KEY is not set: \"ephemeral keys create --org ORG\" makes a key")
	}
	if !strings.Contains(s.Client.URL, "://") {
		return nil, fmt.Errorf("EPHEMERAL_URL=%q has no scheme: want http://%s, or https:// where the server has a certificate", s.Client.URL, s.Client.URL)
	}
	return client.New(s.Client.URL, s.Client.APIKey, client.WithTransport(&reachable{url: s.Client.URL}))
}

// reachable sends requests, and says soon and clearly when there is no server at all: a client would else go on trying.
type reachable struct {
	url  string
	once sync.Once
}

func (r *reachable) RoundTrip(req *http.Request) (*http.Response, error) {
	resp, err := http.DefaultTransport.RoundTrip(req)
	if errors.Is(err, syscall.ECONNREFUSED) && req.Context().Err() == nil {
		r.once.Do(func() {
			fmt.Fprintf(os.Stderr, "nobody listens at %s (EPHEMERAL_URL): is \"ephemeral serve\" running? Trying for a minute\n", r.url)
		})
	}
	return resp, err
}

func runCommand() *cobra.Command {
	var o runOptions
	cmd := &cobra.Command{
		Use:   "run",
		Short: "Post a run, and with --wait show its timeline, result and money",
		Long: `Posts a run to the server at EPHEMERAL_URL with the key EPHEMERAL_API_KEY, and prints its id. With --wait it shows the
timeline as it happens, then the result and the money, and ends with 0 when the run succeeded, with the command's own
exit code when it was a command, and with 1 otherwise.

A repetition with the same --idempotency-key is the same run: nothing is run or charged twice.`,
		Example: `  ephemeral run -f request.json --wait
  ephemeral run --command 'python3 -c "print(6*7)"' --wait
  ephemeral run --command 'wc -l data.csv in/log' --with data.csv --with /var/log/syslog=in/log --wait
  echo '{"command":"id"}' | ephemeral run -f - --wait --output json`,
		Args: arguments,
		RunE: func(cmd *cobra.Command, _ []string) error { return o.run(cmd) },
	}
	f := cmd.Flags()
	f.StringVarP(&o.file, "file", "f", "", "request as JSON; - for standard input")
	f.StringVar(&o.command, "command", "", "run this command instead of a request file")
	f.StringVar(&o.prompt, "prompt", "", "run this prompt instead of a request file")
	f.StringArrayVar(&o.with, "with", nil, "give the run this file, as FILE or FILE=PATH in the run; one above 1 MiB is uploaded first")
	f.StringVar(&o.key, "idempotency-key", "", "key that makes a repetition harmless (default: a new one)")
	f.BoolVar(&o.wait, "wait", false, "follow the run to its end")
	cmd.MarkFlagsMutuallyExclusive("file", "command", "prompt")
	cmd.MarkFlagsOneRequired("file", "command", "prompt")
	o.output.flag(cmd)
	receipts := runsReceiptsCommand() // found under run too: it is about one
	receipts.Hidden = true
	cmd.AddCommand(receipts)
	return cmd
}

type runOptions struct {
	file, command, prompt, key string
	with                       []string
	wait                       bool
	output                     outputFormat
}

func (o *runOptions) run(cmd *cobra.Command) error {
	body, err := o.body(cmd.InOrStdin())
	if err != nil {
		return err
	}
	c, err := openClient()
	if err != nil {
		return err
	}
	if body, err = withFiles(cmd.Context(), c, body, o.with, o.key); err != nil {
		return err
	}
	created, err := c.CreateRunJSON(cmd.Context(), body, client.CreateOptions{IdempotencyKey: o.key})
	if err != nil {
		return err
	}
	if !o.wait {
		return o.output.print(cmd, created.Run, func(w io.Writer) { fmt.Fprintln(w, created.Run.ID) })
	}
	return o.follow(cmd, c, created)
}

// body is the request to send.
func (o *runOptions) body(stdin io.Reader) (json.RawMessage, error) {
	if o.file == "" {
		return json.Marshal(client.Request{Command: o.command, Prompt: o.prompt})
	}
	in := stdin
	if o.file != "-" {
		f, err := os.Open(o.file)
		if err != nil {
			return nil, fmt.Errorf("open the request: %w", err)
		}
		defer f.Close()
		in = f
	}
	b, err := io.ReadAll(io.LimitReader(in, maxRequest+1))
	if err != nil {
		return nil, fmt.Errorf("read the request: %w", err)
	}
	if len(b) > maxRequest {
		return nil, fmt.Errorf("the request is larger than %d bytes", maxRequest)
	}
	return b, nil
}

// follow shows the run's timeline until its end. Interrupted, it leaves the run going and says how to cancel it.
func (o *runOptions) follow(cmd *cobra.Command, c *client.Client, created client.Created) error {
	ctx, id, out := cmd.Context(), created.Run.ID, cmd.OutOrStdout()
	if !o.output.json() {
		printHead(out, created)
		for e, err := range c.Events(ctx, id, 0) {
			if err != nil {
				return followError(ctx, id, err)
			}
			printEvent(out, e)
		}
	}
	r, err := c.Wait(ctx, id)
	if err != nil {
		return followError(ctx, id, err)
	}
	if o.output.json() {
		err = printJSON(out, r)
	} else {
		printEnd(out, r)
	}
	if err != nil {
		return err
	}
	if code := exitOf(r); code != 0 {
		return exitCode(code)
	}
	return nil
}

func followError(ctx context.Context, id run.ID, err error) error {
	if ctx.Err() != nil {
		return fmt.Errorf("interrupted: %s goes on; end it with \"ephemeral runs cancel %s\"", id, id)
	}
	return fmt.Errorf("follow %s: %w", id, err)
}

// exitOf is what the run's end means to a shell.
func exitOf(r run.Run) int {
	switch {
	case r.State != run.Succeeded:
		return 1
	case r.Result != nil && r.Result.ExitCode != nil:
		return *r.Result.ExitCode
	default:
		return 0
	}
}

func runsCommand() *cobra.Command {
	return group("runs", "Show, list, watch, replay, cancel and erase runs, download what they left, and verify their receipts", "",
		runsShowCommand(), runsListCommand(), runsWatchCommand(), runsReplayCommand(), runsCancelCommand(), runsFilesCommand(), runsDownloadCommand(), runsDeleteCommand(),
		runsReceiptsCommand())
}

func runsShowCommand() *cobra.Command {
	var output outputFormat
	return onRun(&cobra.Command{
		Use:   "show RUN",
		Short: "Show a run: its state, and once it has ended its timeline, result and money",
	}, &output, func(cmd *cobra.Command, c *client.Client, id run.ID) error {
		r, err := c.Run(cmd.Context(), id)
		if err != nil {
			return err
		}
		if output.json() {
			return printJSON(cmd.OutOrStdout(), r)
		}
		printHead(cmd.OutOrStdout(), client.Created{Run: r})
		if r.State.Terminal() {
			for e, err := range c.Events(cmd.Context(), r.ID, 0) {
				if err != nil {
					return err
				}
				printEvent(cmd.OutOrStdout(), e)
			}
		}
		printEnd(cmd.OutOrStdout(), r)
		return nil
	})
}

func runsListCommand() *cobra.Command {
	var output outputFormat
	var page run.Page
	var from, to string
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List runs, newest first",
		Example: `  ephemeral runs list --state running
  ephemeral runs list --from 2026-10-01T00:00:00Z --metadata team=red`,
		Args: arguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := openClient()
			if err != nil {
				return err
			}
			if page.QueuedFrom, err = parseTime("--from", from); err != nil {
				return err
			}
			if page.QueuedTo, err = parseTime("--to", to); err != nil {
				return err
			}
			list, err := c.Runs(cmd.Context(), page)
			if err != nil {
				return err
			}
			return output.print(cmd, list, func(w io.Writer) {
				p := paintOn(w)
				for _, r := range list.Runs {
					fmt.Fprintf(w, "%s  %s  %s  %s\n", r.ID, p.event(run.EventType(r.State), fmt.Sprintf("%-16s", r.State)), r.QueuedAt.Format(time.DateTime), r.Money.Charged)
				}
				if list.NextCursor != "" {
					fmt.Fprintf(w, "more with --cursor %s\n", list.NextCursor)
				}
			})
		},
	}
	cmd.Flags().IntVar(&page.Limit, "limit", 20, "runs to list, at most 100")
	cmd.Flags().StringVar(&page.Cursor, "cursor", "", "where the list before ended")
	cmd.Flags().StringVar((*string)(&page.State), "state", "", "only runs in this state")
	cmd.Flags().StringVar(&from, "from", "", "only runs queued at this time or later, as 2026-10-07T12:00:00Z")
	cmd.Flags().StringVar(&to, "to", "", "only runs queued before this time")
	cmd.Flags().StringToStringVar(&page.Metadata, "metadata", nil, "only runs whose metadata has this, as key=value")
	output.flag(cmd)
	return cmd
}

// parseTime reads the time in a flag; zero if it is not given.
func parseTime(flag, s string) (time.Time, error) {
	if s == "" {
		return time.Time{}, nil
	}
	t, err := time.Parse(time.RFC3339Nano, s)
	if err != nil {
		return time.Time{}, fmt.Errorf("%s %q: want a time like 2026-10-07T12:00:00Z", flag, s)
	}
	return t, nil
}

func runsCancelCommand() *cobra.Command {
	var output outputFormat
	return onRun(&cobra.Command{
		Use:   "cancel RUN",
		Short: "End a run",
	}, &output, func(cmd *cobra.Command, c *client.Client, id run.ID) error {
		r, err := c.Cancel(cmd.Context(), id)
		if err != nil {
			return err
		}
		return output.print(cmd, r, func(w io.Writer) { fmt.Fprintln(w, r.State) })
	})
}
