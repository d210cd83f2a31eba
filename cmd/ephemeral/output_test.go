package main

import (
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
)

// noOutput is the commands that --output makes no sense for: servers, whose lines are their log, and what writes text in
// a format of its own.
var noOutput = []string{"serve", "gateway", "node", "man"}

// TestEveryCommandPrintsJSON walks the tree of commands: each that prints something can print it as JSON.
func TestEveryCommandPrintsJSON(t *testing.T) {
	seen := map[string]bool{}
	var walk func(cmd *cobra.Command)
	walk = func(cmd *cobra.Command) {
		for _, c := range cmd.Commands() {
			walk(c)
		}
		name := strings.TrimPrefix(cmd.CommandPath(), "ephemeral ")
		isGroup := cmd.HasSubCommands() && !slices.Contains(noOutput, name)
		if isGroup || !cmd.Runnable() {
			return
		}
		seen[name] = true
		flag := cmd.Flags().Lookup("output")
		if slices.Contains(noOutput, name) {
			if flag != nil {
				t.Errorf("%s has --output and is listed as without it", name)
			}
			return
		}
		if flag == nil {
			t.Errorf("%s has no --output", name)
			return
		}
		if err := flag.Value.Set("json"); err != nil {
			t.Errorf("%s: --output json: %v", name, err)
		}
	}
	walk(root())
	for _, name := range noOutput {
		if !seen[name] {
			t.Errorf("%s is no command", name)
		}
	}
	if len(seen) < 40 {
		t.Errorf("only %d commands seen", len(seen))
	}
}
