package main

import "github.com/spf13/cobra"

func poolCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "pool", Short: "Choose the size of the pool of ready machines"}
	cmd.AddCommand(poolSimulateCommand())
	return cmd
}
