// Package worker is the loop that works on a prompt: it asks a model, runs the tools that the model asks for, hands the
// results back, and ends with a final answer, whatever happens. It reaches models through a broker that it is given an
// HTTP client for, and runs commands through a function that it is given.
package worker

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
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
	CodeTime   = "time_limit"       // the run's time ended before the model had given its final answer by itself
	CodeWorker = "worker_error"     // the worker failed, or was ended from outside
)

// Config is one piece of work.
type Config struct {
	Prompt      string
	Model       string
	Shell       bool // commands may be run, and files read and written
	Files       bool // files may be read and written, without a shell too
	Web         bool
	Door        bool     // programs of the machine reach the broker too
	Connections []string // names
	MaxSteps    int      // model calls at the most; 0: DefaultSteps
	// Deadline is when Run must have returned. Before that the model is asked for its final answer. Zero: none.
	Deadline time.Time
	// HTTP reaches the broker: whatever the address, its connections go there.
	HTTP *http.Client
	// Exec runs a command in the machine. It returns when the command has ended, at the latest soon after its timeout.
	Exec func(context.Context, Command) Output
	// ReadFile reads at most limit bytes of a file, from offset. A relative path is below where the last command ended.
	ReadFile func(ctx context.Context, path string, offset int64, limit int) (FilePart, error)
	// WriteFile writes a file, or adds to it. Paths are those of ReadFile.
	WriteFile func(ctx context.Context, path string, content []byte, add bool) error
}

// EndError is the cause with which the context of Run is ended from outside when its result is still wanted.
type EndError struct {
	Code string // CodeBudget or CodeTime
}

func (e *EndError) Error() string {
	if e.Code == CodeBudget {
		return "the run's money is used up"
	}
	return "the run's time is over"
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
	return newWorker(c, sleep).run(ctx)
}

func newWorker(c Config, sleep func(context.Context, time.Duration) error) *worker {
	w := &worker{Config: c, broker: client{http: c.HTTP, sleep: sleep}, talk: &conversation{}}
	if !c.Deadline.IsZero() {
		w.reserve = min(time.Until(c.Deadline)/5, mostReserve)
	}
	return w
}

type worker struct {
	Config
	broker  client
	permits permits
	tools   map[string]tool
	talk    *conversation
	reserve time.Duration // before the deadline, for the final answer
	done    []deed        // what was done, for an answer without the model
}

// mostReserve is the longest time that is kept for the final answer: a fifth of all, where that is less.
const mostReserve = 30 * time.Second

const (
	lastCall  = "This was your last tool call: no model calls are left but this one. Give your final answer now, from what you have, and say what is missing."
	lastTime  = "The time of this task is nearly over: no tool can be called any more. Give your final answer now, in few words, from what you have, and say what is missing."
	noAnswer  = "Your last message was empty. Give your final answer."
	cutAnswer = "\n\n[The answer was cut off at the output limit.]"
)

func (w *worker) run(ctx context.Context) (result Result) {
	defer func() {
		if p := recover(); p != nil {
			result = w.stopped(CodeWorker, fmt.Sprintf("the worker failed: %v", p))
		}
	}()
	if !w.Deadline.IsZero() {
		var stop context.CancelFunc
		ctx, stop = context.WithDeadlineCause(ctx, w.Deadline, &EndError{CodeTime})
		defer stop()
	}
	w.permits = w.discover(ctx)
	tools, definitions, err := offer(&w.permits)
	if err != nil {
		return w.stopped(CodeWorker, err.Error())
	}
	w.tools, w.talk = tools, newConversation(w.Config, &w.permits, definitions)
	return w.loop(ctx)
}

// limit is why a model call is the last one; empty when it is not.
func (w *worker) limit(step int) (code, detail string) {
	switch {
	case step >= w.MaxSteps:
		return CodeSteps, fmt.Sprintf("within %d model calls", w.MaxSteps)
	case !w.Deadline.IsZero() && time.Until(w.Deadline) < w.reserve:
		return CodeTime, "within the run's time"
	}
	return "", ""
}

func (w *worker) loop(ctx context.Context) Result {
	nudged := false
	for step := 1; ; step++ {
		code, within := w.limit(step)
		last := code != ""
		if last && step > 1 {
			w.talk.addUser(map[string]string{CodeSteps: lastCall, CodeTime: lastTime}[code])
		}
		said, err := w.ask(ctx, last)
		if err != nil {
			return w.failed(ctx, err)
		}
		switch {
		case len(said.calls) > 0 && last:
			w.talk.addAssistant(&answer{text: said.text})
			return w.stopped(code, "no final answer "+within)
		case len(said.calls) > 0:
			w.talk.addAssistant(said)
			if err := w.useAll(ctx, said.calls); err != nil {
				return w.failed(ctx, err)
			}
		case said.text != "" && last && step > 1:
			return w.finished(said, code, within)
		case said.text != "":
			return w.finished(said, "", "")
		case last:
			return w.stopped(code, "no final answer "+within)
		case nudged:
			return w.stopped(CodeModel, "the model gave empty answers")
		default:
			nudged = true
			w.talk.addUser(noAnswer)
		}
	}
}

// useAll makes the calls of one answer, in order, until ctx ends.
func (w *worker) useAll(ctx context.Context, calls []call) error {
	for _, call := range calls {
		w.talk.addResult(call.id, w.use(ctx, call))
		if ctx.Err() != nil {
			return ctx.Err()
		}
	}
	return nil
}

func (w *worker) toolNames() []string { return slices.Sorted(maps.Keys(w.tools)) }

// finished ends with the model's own answer; code is the limit that made it give it, if one did.
func (w *worker) finished(a *answer, code, within string) Result {
	text := a.text
	if a.cut {
		text += cutAnswer
	}
	r := Result{OK: code == "", Output: clean(bound(text, maxFinal)), ErrorCode: code}
	if code != "" {
		r.ErrorDetail = "the model was made to give this answer: it did not come to an end by itself " + within
	}
	return r
}

// failed ends without an answer of the model.
func (w *worker) failed(ctx context.Context, err error) Result {
	var b *brokerError
	var end *EndError
	switch {
	case errors.As(context.Cause(ctx), &end):
		return w.stopped(end.Code, end.Error())
	case ctx.Err() != nil:
		return w.stopped(CodeWorker, "the run was ended from outside")
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
