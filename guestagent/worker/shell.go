package worker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"
)

// The time limits of commands.
const (
	defaultTimeout = 60 * time.Second
	maxTimeout     = time.Hour
	minTimeout     = time.Second // of a command that is shortened because the task's time is nearly over
)

// Command is a command that the model wants to run.
type Command struct {
	Text    string
	Timeout time.Duration
}

// Output is what a command did.
type Output struct {
	Outcome     string // exited, signalled, timed_out, killed, not_found, out_of_memory, lost
	ExitCode    int
	Detail      string   // why it could not be started
	Output      []byte   // standard output and error as they came
	Bytes       int64    // written in all
	Truncated   bool     // Output holds fewer than Bytes
	MemoryLimit int64    // bytes, when the kernel killed a process of it for want of memory
	FullMounts  []string // file systems that had no space left
}

func (w *worker) shell(ctx context.Context, arguments []byte) string {
	c, err := shellCommand(arguments)
	if err != nil {
		return failure(err)
	}
	shortened := w.shorten(&c)
	out := w.Exec(ctx, c)
	status := describe(out, c.Timeout)
	if shortened && out.Outcome == "timed_out" {
		status += " (the task's time is nearly over)"
	}
	w.record("$ "+c.Text, status)
	return status + "\n" + bound(string(out.Output), maxResult)
}

// shellCommand reads and checks the arguments of a call.
func shellCommand(arguments []byte) (Command, error) {
	var args struct {
		Command *string      `json:"command"`
		Timeout *json.Number `json:"timeout_seconds"`
	}
	if err := parse(arguments, &args); err != nil {
		return Command{}, err
	}
	switch {
	case args.Command == nil || strings.TrimSpace(*args.Command) == "":
		return Command{}, errors.New(`the arguments have no "command"`)
	case strings.ContainsRune(*args.Command, 0):
		return Command{}, errors.New("a command cannot hold NUL bytes")
	}
	c := Command{Text: *args.Command, Timeout: defaultTimeout}
	if args.Timeout != nil {
		seconds, err := args.Timeout.Float64()
		if err != nil || seconds <= 0 {
			return Command{}, errors.New(`"timeout_seconds" must be a number above zero`)
		}
		c.Timeout = time.Duration(min(seconds, maxTimeout.Seconds()) * float64(time.Second))
	}
	return c, nil
}

// shorten keeps a command from taking the time in which the final answer must be given.
func (w *worker) shorten(c *Command) bool {
	if w.Deadline.IsZero() {
		return false
	}
	left := max(time.Until(w.Deadline)-w.reserve, minTimeout)
	if c.Timeout <= left {
		return false
	}
	c.Timeout = left
	return true
}

// describe is the first line of a command's result: "exit code N", and what else there is to know.
func describe(o Output, timeout time.Duration) string {
	line := fmt.Sprintf("exit code %d", o.ExitCode)
	switch o.Outcome {
	case "", "exited":
	case "timed_out":
		line += fmt.Sprintf(" (ended after its time limit of %s)", timeout.Round(time.Millisecond))
	case "out_of_memory": // said below
	default:
		line += " (" + strings.ReplaceAll(o.Outcome, "_", " ") + ")"
	}
	if o.Outcome == "out_of_memory" || o.MemoryLimit > 0 {
		line += " (out of memory"
		if o.MemoryLimit > 0 {
			line += fmt.Sprintf(": the limit is %d bytes", o.MemoryLimit)
		}
		line += ")"
	}
	if o.Outcome == "not_found" && o.Detail != "" {
		line += " (" + bound(strings.ReplaceAll(o.Detail, "\n", " "), 1<<10) + ")"
	}
	if len(o.FullMounts) > 0 {
		line += " (no space left on " + strings.Join(o.FullMounts, ", ") + ")"
	}
	if o.Truncated {
		line += fmt.Sprintf(" (the first %d of %d bytes of output were kept)", len(o.Output), o.Bytes)
	}
	return line
}
