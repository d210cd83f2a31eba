package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/ephemeral-run/ephemeral/client"
	"github.com/ephemeral-run/ephemeral/run"
)

func runsFilesCommand() *cobra.Command {
	var output outputFormat
	return onRun(&cobra.Command{
		Use:   "files RUN",
		Short: "List the files that an ended run left in out/",
	}, &output, func(cmd *cobra.Command, c *client.Client, id run.ID) error {
		files, err := c.Files(cmd.Context(), id)
		if err != nil {
			return err
		}
		if files == nil {
			files = []run.Artifact{}
		}
		return output.print(cmd, files, func(w io.Writer) { printFiles(w, files) })
	})
}

// printFiles writes one line a file, in which a name that could steer a terminal is quoted.
func printFiles(w io.Writer, files []run.Artifact) {
	for _, f := range files {
		name := f.Path
		if visible(name) != name || oneLine(name) != name {
			name = strconv.QuoteToGraphic(name)
		}
		fmt.Fprintf(w, "%s  %s  %10d  %s\n", f.SHA256[:min(16, len(f.SHA256))], f.Mode, f.Size, name)
	}
}

func runsDownloadCommand() *cobra.Command {
	var output outputFormat
	var dir string
	cmd := onRun(&cobra.Command{
		Use:   "download RUN",
		Short: "Download the files that an ended run left in out/",
		Long: `Downloads the files that an ended run left in out/ of its working directory, and checks their SHA-256. They are written
below --dir and nowhere else, whatever the run called them. A file appears whole or not at all, and replaces one of that name.`,
		Example: "  ephemeral runs download run_... --dir results",
	}, &output, func(cmd *cobra.Command, c *client.Client, id run.ID) error {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return fmt.Errorf("make the directory: %w", err)
		}
		files, err := c.DownloadAll(cmd.Context(), id, dir)
		if err != nil {
			return err
		}
		if files == nil {
			files = []run.Artifact{}
		}
		return output.print(cmd, files, func(w io.Writer) { printFiles(w, files) })
	})
	cmd.Flags().StringVar(&dir, "dir", ".", "where to write the files; made if it is missing")
	return cmd
}

func runsDeleteCommand() *cobra.Command {
	var output outputFormat
	return onRun(&cobra.Command{
		Use:   "delete RUN",
		Short: "Erase the content of an ended run; the record of its money stays",
	}, &output, func(cmd *cobra.Command, c *client.Client, id run.ID) error {
		if err := c.Delete(cmd.Context(), id); err != nil {
			return err
		}
		return output.confirm(cmd, map[string]string{"deleted": string(id)})
	})
}

func orgsRetainCommand() *cobra.Command {
	var output outputFormat
	cmd := &cobra.Command{
		Use:   "retain ORG DURATION",
		Short: "Set how long the content of an organisation's runs is kept",
		Long: `Sets how long after a run's end its content is erased: prompt, command, files, output and the text of events. It holds for
runs that end from now on, unless they ask for less. 0 keeps content as long as the record of states, times and money, which
EPHEMERAL_RETENTION bounds.`,
		Example: "  ephemeral orgs retain org_... 24h",
		Args:    cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			d, err := time.ParseDuration(args[1])
			if err != nil || d < 0 || d%time.Second != 0 {
				return fmt.Errorf("duration %q: want whole seconds such as 90s or 24h", args[1])
			}
			return withStore(cmd, func(ctx context.Context, s *run.Store) error {
				org, err := s.RetainOrg(ctx, args[0], int(d/time.Second))
				if err != nil {
					return err
				}
				return output.print(cmd, org, func(w io.Writer) {
					fmt.Fprintf(w, "%s keeps content for %v after a run's end\n", org.ID, time.Duration(org.Retention)*time.Second)
				})
			})
		},
	}
	output.flag(cmd)
	return cmd
}
