package broker

import (
	"context"
	"fmt"
	"net/http"
)

// admit waits for one of the run's slots, and keeps the run within the calls it may make.
func (h *Handler) admit(ctx context.Context) (release func(), err error) {
	h.mu.Lock()
	h.calls++
	calls, crowded := h.calls, h.waiting >= maxWaiting
	if calls <= h.b.cfg.MaxCalls && !crowded {
		h.waiting++
	}
	h.mu.Unlock()
	switch {
	case calls > h.b.cfg.MaxCalls:
		return nil, &problem{status: http.StatusTooManyRequests, code: codeCallLimit, message: fmt.Sprintf("a run may make %d calls", h.b.cfg.MaxCalls)}
	case !h.rate.Allow():
		h.unwait(crowded)
		return nil, &problem{status: http.StatusTooManyRequests, code: codeRate, message: fmt.Sprintf("a run may make %d calls a second", h.b.cfg.CallRate)}
	case crowded:
		return nil, &problem{status: http.StatusTooManyRequests, code: codeTooMany, message: "too many calls at once"}
	}
	defer h.unwait(false)
	select {
	case h.slots <- struct{}{}:
		return func() { <-h.slots }, nil
	case <-ctx.Done():
		return nil, errAbandoned
	case <-h.ctx.Done():
		return nil, errAbandoned
	}
}

// unwait leaves the queue for a slot, unless the call was never in it.
func (h *Handler) unwait(never bool) {
	if never {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.waiting--
}

// errAbandoned: nobody waits for the answer any more.
var errAbandoned = &problem{status: http.StatusGone, code: codeRunEnded, message: "the call was abandoned"}
