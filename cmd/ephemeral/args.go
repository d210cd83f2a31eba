package main

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"
)

// arguments demands exactly the arguments that the command's use line names, none of them empty, and says which one is
// missing or too much.
func arguments(cmd *cobra.Command, args []string) error {
	names := strings.Fields(cmd.Use)[1:]
	see := fmt.Sprintf("see \"%s --help\"", cmd.CommandPath())
	switch {
	case len(args) < len(names):
		return fmt.Errorf("missing %s: want \"%s %s\" (%s)", strings.Join(names[len(args):], " and "), cmd.CommandPath(), strings.Join(names, " "), see)
	case len(args) > 0 && len(names) == 0:
		return fmt.Errorf("unexpected argument %q: \"%s\" takes none (%s)", args[0], cmd.CommandPath(), see)
	case len(args) > len(names):
		return fmt.Errorf("unexpected argument %q after %s (%s)", args[len(names)], strings.Join(names, " "), see)
	}
	for i, a := range args {
		if strings.TrimSpace(a) == "" {
			return fmt.Errorf("%s is empty (%s)", names[i], see)
		}
	}
	return nil
}
