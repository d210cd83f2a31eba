package main

import (
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// TestEveryCommandExplainsItself walks the tree of commands: each says in a line what it does, its arguments have names, and
// every flag says what it is for.
func TestEveryCommandExplainsItself(t *testing.T) {
	n := 0
	var walk func(cmd *cobra.Command)
	walk = func(cmd *cobra.Command) {
		n++
		path := cmd.CommandPath()
		if cmd.Short == "" || strings.HasSuffix(cmd.Short, ".") || strings.ContainsRune(cmd.Short, '\n') {
			t.Errorf("%s: %q is no line about it", path, cmd.Short)
		}
		for _, word := range strings.Fields(cmd.Use)[1:] {
			if strings.ToUpper(word) != word && !strings.HasPrefix(word, "[") {
				t.Errorf("%s: argument %q in %q", path, word, cmd.Use)
			}
		}
		for _, line := range strings.Split(cmd.Example, "\n") {
			if line != "" && !strings.HasPrefix(line, "  ") {
				t.Errorf("%s: the example %q is not set in", path, line)
			}
		}
		cmd.Flags().VisitAll(func(f *pflag.Flag) {
			if f.Usage == "" {
				t.Errorf("%s: --%s says nothing", path, f.Name)
			}
		})
		if !strings.Contains(cmd.UsageString(), path) {
			t.Errorf("%s: its usage does not name it", path)
		}
		for _, c := range cmd.Commands() {
			walk(c)
		}
	}
	walk(root())
	if n < 50 {
		t.Errorf("only %d commands", n)
	}
}

// Receipts are found where somebody looks for them: among what is done with runs, and with one.
func TestReceiptsAreFoundTwice(t *testing.T) {
	for _, parent := range []string{"run", "runs"} {
		cmd, args, err := root().Find([]string{parent, "receipts", "run_x"})
		if err != nil || cmd.Name() != "receipts" || len(args) != 1 {
			t.Errorf("%s receipts: %v, %q, %v", parent, cmd.CommandPath(), args, err)
		}
	}
}
