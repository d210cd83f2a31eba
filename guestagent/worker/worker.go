// Package worker is the loop that works on a prompt: it asks a model, runs the tools that the model asks for, hands the
// results back, and ends with a final answer, whatever happens. It reaches models through a broker that it is given an
// HTTP client for, and runs commands through a function that it is given.
package worker

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"
)

// BaseURL is where a Config's HTTP client finds the broker.
const BaseURL = "http://broker"

// DefaultSteps is how many model calls a run may make when it does not say.
const DefaultSteps = 50

// The codes of Result.ErrorCode.
const (
	CodeBudget = "budget_exhausted" // the run's money cannot pay for the next model call
	CodeModel  = "model_error"      // the model, or the way to it, failed
	CodeSteps  = "step_limit"       // the model wanted more calls than the run may make
	CodeWorker = "worker_error"     // the worker failed, or was ended from outside
)

// Config is one piece of work.
type Config struct {
	Prompt      string
	Model       string
	Shell       bool // commands may be run
	Web         bool
	Connections []string
	MaxSteps    int // model calls at the most; 0: DefaultSteps
	// HTTP reaches the broker: whatever the address, its connections go there.
	HTTP *http.Client
	// Exec runs a command in the machine. It returns when the command has ended, at the latest soon after the timeout.
	Exec func(ctx context.Context, command string, timeout time.Duration) Output
}

// Output is what a command did.
type Output struct {
	Outcome   string // exited, signalled, timed_out, killed, not_found, out_of_memory, lost
	ExitCode  int
	Output    []byte // standard output and error as they came
	Bytes     int64  // written in all
	Truncated bool   // Output holds fewer than Bytes
}

// Result is how the work ended. Output is never empty: without a final answer of the model it says what was done so far.
type Result struct {
	OK          bool
	Output      string
	ErrorCode   string
	ErrorDetail string
}

// Run works until the model gives its final answer, a limit is reached or ctx ends. It does not panic.
func Run(ctx context.Context, c Config) (result Result) {
	if c.MaxSteps <= 0 {
		c.MaxSteps = DefaultSteps
	}
	w := &worker{Config: c, broker: client{http: c.HTTP, sleep: sleep}, talk: newConversation(c)}
	defer func() {
		if p := recover(); p != nil {
			result = w.stopped(CodeWorker, fmt.Sprintf("the worker failed: %v", p))
		}
	}()
	return w.run(ctx)
}

type worker struct {
	Config
	broker client
	talk   *conversation
	done   []deed // what was done, for an answer without the model
}

const (
	lastCall  = "This was your last tool call: no model calls are left but this one. Give your final answer now, from what you have, and say what is missing."
	noAnswer  = "Your last message was empty. Give your final answer."
	cutAnswer = "\n\n[The answer was cut off at the output limit.]"
)

func (w *worker) run(ctx context.Context) Result {
	nudged := false
	for step := 1; ; step++ {
		last := step == w.MaxSteps
		if last && step > 1 {
			w.talk.addUser(lastCall)
		}
		said, err := w.ask(ctx, last)
		if err != nil {
			return w.failed(ctx, err)
		}
		switch {
		case len(said.calls) > 0 && last:
			w.talk.addAssistant(&answer{text: said.text})
			return w.stopped(CodeSteps, fmt.Sprintf("no final answer within %d model calls", w.MaxSteps))
		case len(said.calls) > 0:
			w.talk.addAssistant(said)
			for _, call := range said.calls {
				w.talk.addResult(call.id, w.use(ctx, call))
				if ctx.Err() != nil {
					return w.failed(ctx, ctx.Err())
				}
			}
		case said.text != "":
			return w.finished(said, last && step > 1)
		case last:
			return w.stopped(CodeSteps, fmt.Sprintf("no final answer within %d model calls", w.MaxSteps))
		case nudged:
			return w.stopped(CodeModel, "the model gave empty answers")
		default:
			nudged = true
			w.talk.addUser(noAnswer)
		}
	}
}

// finished ends with the model's own answer; atLimit says that it was made to give it.
func (w *worker) finished(a *answer, atLimit bool) Result {
	text := a.text
	if a.cut {
		text += cutAnswer
	}
	r := Result{OK: true, Output: bound(text, maxFinal)}
	if atLimit {
		r.OK, r.ErrorCode = false, CodeSteps
		r.ErrorDetail = fmt.Sprintf("the model had used all of its %d calls when it gave this answer", w.MaxSteps)
	}
	return r
}

// failed ends without an answer of the model.
func (w *worker) failed(ctx context.Context, err error) Result {
	var b *brokerError
	switch {
	case ctx.Err() != nil:
		return w.stopped(CodeWorker, "the run's time ended, or it was cancelled")
	case errors.As(err, &b) && b.code == CodeBudget:
		return w.stopped(CodeBudget, b.message)
	case errors.As(err, &b) && b.status == http.StatusGone:
		return w.stopped(CodeWorker, b.message)
	}
	return w.stopped(CodeModel, err.Error())
}

// ask sends the conversation to the model, shortened until the model takes it.
func (w *worker) ask(ctx context.Context, last bool) (*answer, error) {
	limit := maxContext
	for {
		w.talk.shorten(limit)
		answer, err := w.broker.complete(ctx, w.talk.request(w.Model, last))
		var b *brokerError
		if limit = min(limit, w.talk.size) / 2; limit < minContext || !errors.As(err, &b) || !b.tooLong() {
			return answer, err
		}
	}
}

func sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-t.C:
		return nil
	}
}
