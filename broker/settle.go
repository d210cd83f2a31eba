package broker

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/ephemeral-run/ephemeral/run"
)

// How long the money may take.
const (
	authoriseTimeout = 30 * time.Second
	settleTimeout    = 60 * time.Second
)

// authorise computes the worst case of the call and reserves it, with the output cut down to what the run can pay.
func (c *call) authorise(ctx context.Context) error {
	wanted := c.req.limit
	if wanted == 0 {
		wanted = c.cost.MaxOutputTokens
	}
	var err error
	if c.body, err = c.req.body(c.name, c.provider, wanted); err != nil {
		return err
	}
	c.input = int64(len(c.body)) + inputMargin
	ask := run.Call{
		ID: c.id, Kind: run.KindModel,
		Min: c.cost.Worst(c.input, min(wanted, minOutput)), Max: c.cost.Worst(c.input, wanted),
	}
	c.limit = wanted
	if ask.Max == 0 {
		return nil // a free model
	}
	err = c.h.insist(ctx, authoriseTimeout, func(ctx context.Context) (err error) {
		c.granted, err = c.h.s.Ledger.Authorize(ctx, ask)
		return err
	})
	if err != nil {
		return c.notAuthorised(err)
	}
	c.granted = min(c.granted, ask.Max)
	if c.limit = c.cost.Affordable(c.granted, c.input, wanted); c.limit < 1 {
		c.void() // a ledger that grants less than the least
		return c.notAuthorised(run.ErrBudget)
	}
	if c.limit < wanted {
		c.body, err = c.req.body(c.name, c.provider, c.limit)
		if err != nil {
			c.void()
		}
	}
	return err
}

// notAuthorised is the guest's answer when the ledger refused or failed.
func (c *call) notAuthorised(err error) *problem {
	switch {
	case errors.Is(err, run.ErrBudget):
		c.emit(0, false, codeBudget)
		return &problem{status: http.StatusPaymentRequired, code: codeBudget, message: "the run's budget cannot pay for this call"}
	case errors.Is(err, run.ErrLeaseLost), errors.Is(err, run.ErrState), errors.Is(err, run.ErrNotFound):
		return &problem{status: http.StatusGone, code: codeRunEnded, message: "the run has ended"}
	case c.abandoned():
		return errAbandoned
	}
	c.h.log.Error("model call not authorised", "error", err)
	return &problem{status: http.StatusServiceUnavailable, code: codeUnavailable, message: "the run's budget cannot be reached just now"}
}

// settle charges a finished call.
func (c *call) settle() {
	if u := c.meter.usage; u != nil {
		c.charge(u.Prompt, u.cached(), u.Completion, false, "")
		return
	}
	c.settleEstimated("")
}

// settleEstimated charges a call whose usage is not known.
func (c *call) settleEstimated(reason string) {
	if u := c.meter.usage; u != nil {
		c.charge(u.Prompt, u.cached(), u.Completion, false, reason) // it broke behind the usage
		return
	}
	c.charge(c.input, 0, min(c.meter.textBytes, c.limit), true, reason)
}

// settleAbandoned charges a call that nobody waits for any more, when the provider may have worked on it.
func (c *call) settleAbandoned() {
	if c.sent.Load() || c.meter.textBytes > 0 {
		c.settleEstimated("abandoned")
		return
	}
	c.settleFailed("abandoned")
}

// settleFailed gives the money of a failed call back.
func (c *call) settleFailed(reason string) {
	c.void()
	c.emit(0, false, reason)
}

// charge captures what the call cost, never more than was authorised.
func (c *call) charge(input, cached, output int64, estimated bool, reason string) {
	amount := min(c.cost.Cost(input, cached, output), c.granted)
	if c.granted > 0 {
		err := c.h.finally(func(ctx context.Context) error { return c.h.s.Ledger.Capture(ctx, c.id, amount) })
		if err != nil {
			c.h.log.Error("model call not captured", "call", c.id, "micros", int64(amount), "error", err)
			amount, reason = 0, "the charge could not be recorded"
		}
	}
	c.h.count(input, output)
	c.emit(amount, estimated, reason, input, output)
}

// void gives back what was authorised.
func (c *call) void() {
	if c.granted == 0 {
		return
	}
	err := c.h.finally(func(ctx context.Context) error { return c.h.s.Ledger.Void(ctx, c.id) })
	if err != nil {
		c.h.log.Error("model call not voided", "call", c.id, "error", err)
	}
}

func (c *call) emit(charged run.Micros, estimated bool, reason string, tokens ...int64) {
	d := run.ModelData{
		Model: c.h.s.Spec.Model, Status: c.status, Duration: float64(time.Since(c.began).Microseconds()) / 1000,
		Charged: charged, Estimated: estimated, Error: reason,
	}
	if len(tokens) == 2 {
		d.InputTokens, d.OutputTokens = tokens[0], tokens[1]
	}
	if u := c.meter.usage; u != nil && !estimated {
		d.CachedTokens, d.ReasoningTokens = u.cached(), u.reasoning()
	}
	c.h.emit(run.EventModel, d, c.id)
}

// finally does what must be done whether or not anybody still waits.
func (h *Handler) finally(do func(context.Context) error) error {
	return h.insist(context.WithoutCancel(h.ctx), settleTimeout, do)
}

// insist repeats a call to the ledger while the store is away.
func (h *Handler) insist(ctx context.Context, most time.Duration, do func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, most)
	defer cancel()
	for n := 1; ; n++ {
		err := do(ctx)
		if !errors.Is(err, run.ErrUnavailable) {
			return err
		}
		if h.b.sleep(ctx, backOff(n, 50*time.Millisecond, 2*time.Second)) != nil {
			return fmt.Errorf("after %d tries: %w", n, err)
		}
	}
}
