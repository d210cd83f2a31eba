// Command cmd runs commands where KVM is usable: on this host, or in a box.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/ephemeral-run/ephemeral/test/kvmbox"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	root := &cobra.Command{Use: "kvmbox", Short: "Run commands where KVM is usable", SilenceUsage: true, SilenceErrors: true}
	root.AddCommand(runCommand())
	err := root.ExecuteContext(ctx)
	var code exitCode
	switch {
	case errors.As(err, &code):
		stop()
		os.Exit(int(code))
	case err != nil:
		fmt.Fprintln(os.Stderr, "kvmbox:", err)
		stop()
		os.Exit(1)
	}
}

// exitCode is that of a command, to end with.
type exitCode int

func (c exitCode) Error() string { return fmt.Sprintf("exit code %d", int(c)) }

func runCommand() *cobra.Command {
	var carry []string
	var dir string
	var limit time.Duration
	cmd := &cobra.Command{
		Use:   "run [flags] -- command...",
		Short: "Run one command; what is carried is in $CARRY in a box",
		Args:  cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			ctx, cancel := context.WithTimeout(cmd.Context(), limit)
			defer cancel()
			o := options(dir)
			for _, c := range carry {
				name, path, ok := strings.Cut(c, "=")
				if path, err = filepath.Abs(path); !ok || err != nil {
					return fmt.Errorf("--carry %q: want name=path", c)
				}
				o.Carry[name] = path
			}
			place, err := kvmbox.Open(ctx, o)
			if err != nil {
				return err
			}
			defer func() { err = errors.Join(err, place.Close()) }()
			code, err := place.Run(ctx, kvmbox.Command{Args: args, Stdout: os.Stdout, Stderr: os.Stderr})
			if err == nil && code != 0 {
				err = exitCode(code)
			}
			return err
		},
	}
	cmd.Flags().StringArrayVar(&carry, "carry", nil, "name=path of a file or directory to take along (repeatable)")
	cmd.Flags().StringVar(&dir, "dir", "build/kvmbox", "directory of what boxes are made from")
	cmd.Flags().DurationVar(&limit, "limit", 10*time.Minute, "time for all of it")
	return cmd
}

// options are the defaults, with progress shown on standard error. The working directory is the checkout.
func options(dir string) kvmbox.Options {
	began := time.Now()
	root, err := os.Getwd()
	if err != nil {
		root = "."
	}
	if !filepath.IsAbs(dir) {
		dir = filepath.Join(root, dir)
	}
	return kvmbox.Options{Dir: dir, Root: root, Carry: map[string]string{}, Progress: func(line string) {
		fmt.Fprintf(os.Stderr, "%6.1fs  %s\n", time.Since(began).Seconds(), line)
	}}
}
