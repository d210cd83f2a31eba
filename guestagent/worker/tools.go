package worker

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"time"
)

// The bounds of tools.
const (
	maxResult      = 16 << 10  // of a tool's result as the model sees it
	maxFinal       = 256 << 10 // of the final answer
	maxDeeds       = 64
	defaultTimeout = 60 * time.Second
	maxTimeout     = time.Hour
)

var shellTool = json.RawMessage(`[{"type":"function","function":{"name":"shell","description":"Run a command with sh -c in the machine. The result is the exit code and the output, standard output and error as they came.",` +
	`"parameters":{"type":"object","properties":{"command":{"type":"string","description":"the command"},` +
	`"timeout_seconds":{"type":"integer","description":"when to end the command and all it started; 60 if not given","minimum":1,"maximum":3600}},"required":["command"]}}}]`)

// deed is one thing done, for an answer that the worker must write itself.
type deed struct {
	what, how string
}

// use does what a tool call asks for. Whatever is wrong with the call is told to the model, which can do better.
func (w *worker) use(ctx context.Context, c call) string {
	if c.name != "shell" || !w.Shell {
		tools := "There are no tools in this task."
		if w.Shell {
			tools = "The only tool is shell."
		}
		return fmt.Sprintf("error: there is no tool %q. %s", bound(c.name, 64), tools)
	}
	var args struct {
		Command *string      `json:"command"`
		Timeout *json.Number `json:"timeout_seconds"`
	}
	if err := json.Unmarshal([]byte(c.arguments), &args); err != nil {
		return fmt.Sprintf("error: the arguments are not the JSON object that the tool takes: %v. They were: %s", err, clean(bound(c.arguments, 512)))
	}
	if args.Command == nil || strings.TrimSpace(*args.Command) == "" {
		return `error: the arguments have no "command".`
	}
	if strings.ContainsRune(*args.Command, 0) {
		return "error: a command cannot hold NUL bytes."
	}
	timeout := defaultTimeout
	if args.Timeout != nil {
		seconds, err := args.Timeout.Float64()
		if err != nil || seconds <= 0 {
			return `error: "timeout_seconds" must be a number above zero.`
		}
		timeout = time.Duration(min(seconds, maxTimeout.Seconds()) * float64(time.Second))
	}
	out := w.Exec(ctx, *args.Command, timeout)
	status := describe(out, timeout)
	w.record(*args.Command, status)
	return status + "\n" + clean(bound(string(out.Output), maxResult))
}

// describe is the first line of a command's result: "exit code N", and what else there is to know.
func describe(o Output, timeout time.Duration) string {
	line := fmt.Sprintf("exit code %d", o.ExitCode)
	switch o.Outcome {
	case "", "exited":
	case "timed_out":
		line += fmt.Sprintf(" (ended after its time limit of %s)", timeout)
	default:
		line += " (" + strings.ReplaceAll(o.Outcome, "_", " ") + ")"
	}
	if o.Truncated {
		line += fmt.Sprintf(" (the first %d of %d bytes of output were kept)", len(o.Output), o.Bytes)
	}
	return line
}

// clean makes text of output: JSON cannot carry other bytes, and some providers refuse NUL.
func clean(s string) string {
	return strings.ToValidUTF8(strings.ReplaceAll(s, "\x00", "\uFFFD"), "\uFFFD")
}

func (w *worker) record(command, status string) {
	first, _, more := strings.Cut(strings.TrimSpace(command), "\n")
	if more {
		first += " ..."
	}
	w.done = append(w.done, deed{what: bound(first, 256), how: status})
}

// stopped ends with what was done so far.
func (w *worker) stopped(code, detail string) Result {
	detail = clean(bound(detail, 2<<10))
	var b bytes.Buffer
	fmt.Fprintf(&b, "The work ended without a final answer: %s\n", detail)
	if text := w.talk.lastText(); text != "" {
		fmt.Fprintf(&b, "\nThe last words of the model:\n%s\n", bound(text, 16<<10))
	}
	if len(w.done) == 0 {
		b.WriteString("\nNo command was run.\n")
	} else {
		fmt.Fprintf(&b, "\nCommands run: %d\n", len(w.done))
		for _, d := range w.done[max(0, len(w.done)-maxDeeds):] {
			fmt.Fprintf(&b, "- $ %s: %s\n", d.what, d.how)
		}
	}
	return Result{Output: bound(strings.TrimSuffix(b.String(), "\n"), maxFinal), ErrorCode: code, ErrorDetail: detail}
}

// lastText is the last text of the model beside its tool calls.
func (t *conversation) lastText() string {
	for i := len(t.messages) - 1; i >= 0; i-- {
		if m := t.messages[i]; m.Role == "assistant" && m.Content != nil && *m.Content != "" {
			return *m.Content
		}
	}
	return ""
}
