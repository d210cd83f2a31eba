package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/ephemeral-run/ephemeral/client"
	"github.com/ephemeral-run/ephemeral/run"
)

func runsWatchCommand() *cobra.Command {
	var output outputFormat
	return onRun(&cobra.Command{
		Use:   "watch RUN",
		Short: "Follow a run from its beginning to its end",
		Long: `Shows a run's timeline from its beginning, live as long as it goes on, then its result and money. It ends as "ephemeral
run --wait" does. With --output json it prints the events, one JSON object a line.`,
	}, &output, func(cmd *cobra.Command, c *client.Client, id run.ID) error {
		r, err := c.Run(cmd.Context(), id)
		if err != nil {
			return err
		}
		return watch(cmd, c, r, output, 0)
	})
}

func runsReplayCommand() *cobra.Command {
	var output outputFormat
	var speed float64
	cmd := onRun(&cobra.Command{
		Use:   "replay RUN",
		Short: "Play an ended run again, from its recorded times",
		Long: `Plays an ended run's timeline again, each event at the time at which it happened, divided by --speed; 0 shows all at once.
With --output json it prints the events, one JSON object a line.`,
		Example: `  ephemeral runs replay run_0199c2f6a1b27c3d8e4f5a6b7c8d9e0f --speed 8`,
	}, &output, func(cmd *cobra.Command, c *client.Client, id run.ID) error {
		if speed < 0 {
			return errors.New("--speed must not be negative")
		}
		r, err := c.Run(cmd.Context(), id)
		if err != nil {
			return err
		}
		if !r.State.Terminal() {
			return fmt.Errorf("%s has not ended: \"ephemeral runs watch %s\" follows it", r.ID, r.ID)
		}
		return watch(cmd, c, r, output, speed)
	})
	cmd.Flags().Float64Var(&speed, "speed", 1, "how many times as fast as it happened; 0: all at once")
	return cmd
}

// watch shows a run's events as they come, or at speed, and its end.
func watch(cmd *cobra.Command, c *client.Client, r run.Run, output outputFormat, speed float64) error {
	ctx, out := cmd.Context(), cmd.OutOrStdout()
	lines := json.NewEncoder(out)
	lines.SetEscapeHTML(false)
	if !output.json() {
		printHead(out, client.Created{Run: r})
	}
	began := time.Now()
	for e, err := range c.Events(ctx, r.ID, 0) {
		if err != nil {
			return followError(ctx, r.ID, err)
		}
		if speed > 0 && !waitUntil(ctx, began.Add(time.Duration(e.At/speed*float64(time.Millisecond)))) {
			return ctx.Err()
		}
		if output.json() {
			if err := lines.Encode(e); err != nil {
				return fmt.Errorf("print event: %w", err)
			}
			continue
		}
		printEvent(out, e)
	}
	r, err := c.Wait(ctx, r.ID)
	if err != nil {
		return followError(ctx, r.ID, err)
	}
	if !output.json() {
		printEnd(out, r)
	}
	if code := exitOf(r); code != 0 && speed == 0 {
		return exitCode(code)
	}
	return nil
}

// waitUntil waits until t and tells whether ctx lasted so long.
func waitUntil(ctx context.Context, t time.Time) bool {
	timer := time.NewTimer(time.Until(t))
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}

// completeRuns offers the latest runs to the shell, with their states.
func completeRuns(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	c, err := openClient()
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	ctx, cancel := context.WithTimeout(cmd.Context(), 2*time.Second)
	defer cancel()
	list, err := c.Runs(ctx, run.Page{Limit: 20})
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	offers := make([]string, 0, len(list.Runs))
	for _, r := range list.Runs {
		offers = append(offers, cobra.CompletionWithDesc(string(r.ID), string(r.State)))
	}
	return offers, cobra.ShellCompDirectiveNoFileComp | cobra.ShellCompDirectiveKeepOrder
}
