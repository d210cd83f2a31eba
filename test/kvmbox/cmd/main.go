// Command cmd runs commands and the product's tests where KVM is usable: on this host, or in a box.
package main

import (
	"context"
	"encoding/json"
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
	root.AddCommand(runCommand(), testCommand(), benchCommand())
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
	var box bool
	cmd := &cobra.Command{
		Use:   "run [flags] -- command...",
		Short: "Run one command; what is carried is in /carry in a box",
		Args:  cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			ctx, cancel := context.WithTimeout(cmd.Context(), limit)
			defer cancel()
			o, err := options(dir)
			if err != nil {
				return err
			}
			o.Box = box
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
	cmd.Flags().BoolVar(&box, "box", false, "take a box even where this host's KVM serves")
	return cmd
}

func testCommand() *cobra.Command {
	var s kvmbox.Suite
	var output string
	cmd := &cobra.Command{
		Use:   "test",
		Short: "Run the conformance suite of every driver, and the recorded run",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			o, err := options(s.Dir)
			if err != nil {
				return err
			}
			s.Root, s.Dir, s.Out, s.Progress = o.Root, o.Dir, os.Stdout, o.Progress
			record, err := s.Run(cmd.Context())
			record.Summarise(os.Stdout)
			if err := write(output, record); err != nil {
				return err
			}
			if err == nil && !record.Passed() {
				err = errors.New("not all is well")
			}
			return err
		},
	}
	cmd.Flags().StringVar(&s.Dir, "dir", "build/kvmbox", "directory of what boxes are made from")
	cmd.Flags().StringVar(&s.ImageDir, "images", "build/images", "directory of images")
	cmd.Flags().StringVar(&output, "output", "build/test-kvm.json", "file for the record")
	cmd.Flags().DurationVar(&s.Limit, "limit", 60*time.Minute, "time for each part")
	cmd.Flags().IntVar(&s.Rounds, "rounds", 1, "how often Cloud Hypervisor's conformance suite runs")
	cmd.Flags().BoolVar(&s.Box, "box", false, "take a box even where this host's KVM serves")
	cmd.Flags().StringSliceVar(&s.Only, "only", nil, "parts to run: qemu, cloud-hypervisor, run (all when empty)")
	return cmd
}

func benchCommand() *cobra.Command {
	var b kvmbox.Bench
	cmd := &cobra.Command{
		Use:   "bench",
		Short: "Measure machines of Cloud Hypervisor beside bare ones",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			o, err := options(b.Dir)
			if err != nil {
				return err
			}
			b.Root, b.Dir, b.Progress = o.Root, o.Dir, o.Progress
			return b.Run(cmd.Context())
		},
	}
	cmd.Flags().StringVar(&b.Dir, "dir", "build/kvmbox", "directory of what boxes are made from")
	cmd.Flags().StringVar(&b.ImageDir, "images", "build/images", "directory of images")
	cmd.Flags().StringVar(&b.Output, "output", "build/bench-kvm.json", "file for the rows")
	cmd.Flags().DurationVar(&b.Limit, "limit", 30*time.Minute, "time for all of it")
	cmd.Flags().IntVar(&b.Rounds, "rounds", 20, "how often each is measured")
	cmd.Flags().BoolVar(&b.Box, "box", false, "take a box even where this host's KVM serves")
	return cmd
}

func write(path string, record *kvmbox.Record) error {
	b, err := json.MarshalIndent(record, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(path, append(b, '\n'), 0o644)
}

// options are the defaults, with progress shown on standard error. The working directory is the checkout.
func options(dir string) (kvmbox.Options, error) {
	began := time.Now()
	root, err := os.Getwd()
	if err != nil {
		return kvmbox.Options{}, err
	}
	if !filepath.IsAbs(dir) {
		dir = filepath.Join(root, dir)
	}
	return kvmbox.Options{Dir: dir, Root: root, Carry: map[string]string{}, Progress: func(line string) {
		fmt.Fprintf(os.Stderr, "%6.1fs  %s\n", time.Since(began).Seconds(), line)
	}}, nil
}
