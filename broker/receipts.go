package broker

import (
	"github.com/ephemeral-run/ephemeral/run"
)

// sign gives the event of an outward call its receipt: one for the data as it is shown and, under zero data retention, one
// with the same number for the data as it is stored.
func (h *Handler) sign(e *run.NewEvent, call string) {
	s := h.b.cfg.Receipts
	if s == nil {
		return
	}
	h.mu.Lock()
	h.receipt++
	number := h.receipt
	h.mu.Unlock()
	shown, err := s.Sign(h.s.Run, e.Type, e.Data, call, number, e.At)
	var kept any
	if err == nil && h.s.Spec.ZeroDataRetention {
		kept, err = s.Sign(h.s.Run, e.Type, withoutContent(e.Data), call, number, e.At)
	}
	if err != nil {
		h.log.Error("event not signed", "type", string(e.Type), "error", err)
		return
	}
	e.Data, e.Redacted = shown, kept
}

// withoutContent is what zero data retention stores of an outward call.
func withoutContent(data any) any {
	switch d := data.(type) {
	case run.CallData:
		d.Target, d.Error = "", ""
		return d
	case run.ModelData:
		d.Error = ""
		return d
	}
	return data
}
