package main

import (
	"github.com/spf13/cobra"

	"github.com/ephemeral-run/ephemeral/client"
	"github.com/ephemeral-run/ephemeral/run"
)

// onRun completes a command whose one argument is the id of a run, which the shell can complete: do gets a client of the
// server and the id. It adds --output.
func onRun(cmd *cobra.Command, output *outputFormat, do func(cmd *cobra.Command, c *client.Client, id run.ID) error) *cobra.Command {
	cmd.Args, cmd.ValidArgsFunction = arguments, completeRuns
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		c, err := openClient()
		if err != nil {
			return err
		}
		return do(cmd, c, run.ID(args[0]))
	}
	output.flag(cmd)
	return cmd
}
