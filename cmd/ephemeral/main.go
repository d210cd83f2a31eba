// Command ephemeral is the host's one binary: server, node, gateway and the tools of an operator.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/ephemeral-run/ephemeral/client"
)

// version is set when the binary is built.
var version = "dev"

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop) // a second signal ends the process at once
	err := root().ExecuteContext(ctx)
	var code exitCode
	switch {
	case err == nil:
	case errors.As(err, &code):
		stop()
		os.Exit(int(code))
	default:
		fmt.Fprintln(os.Stderr, "ephemeral:", err)
		var p *client.Problem
		if errors.As(err, &p) && p.Remediation != "" {
			fmt.Fprintln(os.Stderr, "what to do:", p.Remediation)
		}
		stop()
		os.Exit(1)
	}
}

// exitCode ends the process with a code and no message: what had to be said is on the screen.
type exitCode int

func (c exitCode) Error() string { return fmt.Sprintf("exit code %d", int(c)) }

func root() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "ephemeral",
		Short: "Run untrusted code in a microVM that exists for one run",
		Long: `Ephemeral runs untrusted, agent-written code in a microVM that exists for one run.

Start everything on one host with "ephemeral serve", then post a run with "ephemeral run -f request.json --wait".
Every setting is an environment variable: "ephemeral config" lists them.`,
		Version:       version,
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	cmd.AddCommand(serveCommand(), gatewayCommand(), nodeCommand(), runCommand(), runsCommand(), orgsCommand(), keysCommand(), connectionsCommand(),
		poolCommand(), imageCommand(), doctorCommand(), configCommand(), manCommand())
	return cmd
}

// group is a command that only holds others.
func group(use, short, long string, commands ...*cobra.Command) *cobra.Command {
	cmd := &cobra.Command{
		Use: use, Short: short, Long: long,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return fmt.Errorf("unknown command %q for %q: see \"%s --help\"", args[0], cmd.CommandPath(), cmd.CommandPath())
			}
			return cmd.Help()
		},
	}
	cmd.AddCommand(commands...)
	return cmd
}
