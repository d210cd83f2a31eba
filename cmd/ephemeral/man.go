package main

import (
	"fmt"
	"os"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"
)

func manCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "man DIRECTORY",
		Short: "Write the manual pages into a directory",
		Long: `Writes one manual page for each command into a directory, which is made where it does not exist. Read them with
"man -l DIRECTORY/ephemeral.1", or install them below a directory of MANPATH, in man1.`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := os.MkdirAll(args[0], 0o755); err != nil {
				return fmt.Errorf("make the directory: %w", err)
			}
			cmd.Root().DisableAutoGenTag = true // the same program writes the same pages
			header := &doc.GenManHeader{Title: "EPHEMERAL", Section: "1", Source: "Ephemeral " + version, Manual: "Ephemeral"}
			if err := doc.GenManTree(cmd.Root(), header, args[0]); err != nil {
				return fmt.Errorf("write the manual pages: %w", err)
			}
			return nil
		},
	}
}
