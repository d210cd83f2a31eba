package main

import "github.com/spf13/cobra"

func poolCommand() *cobra.Command {
	return group("pool", "Choose the size of the pool of ready machines", "", poolSimulateCommand())
}
