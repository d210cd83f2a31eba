package broker

import (
	"context"
	"crypto/rand"
	"errors"
	"net/http"
	"time"

	"github.com/ephemeral-run/ephemeral/run"
)

// outward is one call at a fixed price: to a connection or the web. It is paid when its upstream began to answer.
type outward struct {
	h       *Handler
	event   run.EventType
	id      string // of the ledger
	began   time.Time
	granted run.Micros
	data    run.CallData
}

// outward authorises a call. Whoever gets one must end it with done.
func (h *Handler) outward(ctx context.Context, event run.EventType, data run.CallData, price run.Micros) (*outward, error) {
	o := &outward{h: h, event: event, id: data.Kind + "_" + rand.Text(), began: time.Now(), data: data}
	if price == 0 {
		return o, nil
	}
	err := h.insist(ctx, authoriseTimeout, func(ctx context.Context) (err error) {
		o.granted, err = h.s.Ledger.Authorize(ctx, run.Call{ID: o.id, Kind: run.KindWeb, Min: price, Max: price})
		return err
	})
	if err == nil {
		return o, nil
	}
	p := h.notPaid(ctx, err)
	o.data.Error = p.code
	o.tell()
	return nil, p
}

// notPaid is the guest's answer when the ledger refused or failed.
func (h *Handler) notPaid(ctx context.Context, err error) *problem {
	switch {
	case errors.Is(err, run.ErrBudget):
		return &problem{status: http.StatusPaymentRequired, code: codeBudget, message: "the run's budget cannot pay for this call"}
	case errors.Is(err, run.ErrLeaseLost), errors.Is(err, run.ErrState), errors.Is(err, run.ErrNotFound):
		return &problem{status: http.StatusGone, code: codeRunEnded, message: "the run has ended"}
	case ctx.Err() != nil:
		return errAbandoned
	}
	h.log.Error("call not authorised", "error", err)
	return &problem{status: http.StatusServiceUnavailable, code: codeUnavailable, message: "the run's budget cannot be reached just now"}
}

// done ends the call: it is charged when the upstream began to answer and void otherwise. reason says what went wrong, if
// anything did, in words that are neither the upstream's nor the guest's.
func (o *outward) done(answered bool, status int, bytes int64, reason string) {
	o.data.Status, o.data.Bytes, o.data.Error = status, bytes, reason
	if o.granted > 0 {
		charge := answered
		err := o.h.finally(func(ctx context.Context) error {
			if charge {
				return o.h.s.Ledger.Capture(ctx, o.id, o.granted)
			}
			return o.h.s.Ledger.Void(ctx, o.id)
		})
		switch {
		case err != nil:
			o.h.log.Error("call not settled", "call", o.id, "micros", int64(o.granted), "error", err)
			o.data.Error = "the charge could not be recorded"
		case charge:
			o.data.Charged = o.granted
		}
	}
	o.tell()
}

func (o *outward) tell() {
	o.data.Duration = float64(time.Since(o.began).Microseconds()) / 1000
	o.h.emit(o.event, o.data, o.id)
}
