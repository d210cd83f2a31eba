package run

import (
	"context"
	"fmt"
	"regexp"
)

// maxCalls bounds the paid calls of one run; the next one is refused with ErrBudget.
const maxCalls = 100_000

var callPattern = regexp.MustCompile(`^[!-~]{1,128}$`)

var authorizeScript, captureScript = loadScript("authorize"), loadScript("capture")

// Authorize sets aside what one call may cost at worst: as much as the hold has free beside c.Leave, at most c.Max, at
// least c.Min. When the hold has less free than c.Min it refuses with ErrBudget and nothing is set aside. The same call again gets the same grant, as long as it
// is neither captured nor void (ErrState then). ErrLeaseLost: the run is not the caller's. ErrRange: no such kind, bad
// id or amounts.
//
// Script authorize.lua.
func (s *Store) Authorize(ctx context.Context, l *Lease, c Call) (granted Micros, err error) {
	fail := func(err error) (Micros, error) {
		return 0, fmt.Errorf("authorise %s call %.128q of %s: %w", c.Kind, c.ID, l.Run, err)
	}
	switch {
	case c.Kind != KindModel && c.Kind != KindWeb && c.Kind != KindCompute:
		return fail(ErrRange)
	case !callPattern.MatchString(c.ID):
		return fail(fmt.Errorf("call id: want 1 to 128 visible ASCII characters: %w", ErrRange))
	case c.Min < 0 || c.Max < c.Min || c.Max > maxMicros || c.Leave < 0 || c.Leave > maxMicros:
		return fail(fmt.Errorf("between %d and %d micro-dollars, leaving %d: %w", c.Min, c.Max, c.Leave, ErrRange))
	}
	r, err := s.eval(ctx, authorizeScript, []string{s.keys.run(string(l.Run)), s.keys.calls(string(l.Run))},
		l.Token, c.ID, string(c.Kind), int64(c.Min), int64(c.Max), maxCalls, int64(c.Leave))
	if err == nil {
		err = refused(r)
	}
	if err != nil {
		return fail(err)
	}
	n, err := r.int(1)
	if err != nil {
		return fail(err)
	}
	return Micros(n), nil
}

// Capture charges what a call cost and frees the rest of its grant. An amount above the grant is ErrRange, and the call
// stays as it is. The same capture again changes nothing, also after the run has ended; any other is ErrState.
// ErrNotFound: the call was never authorised. ErrLeaseLost: the run is not the caller's. The capture with which 90 percent
// of the hold are charged appends the event budget.warning.
//
// Script capture.lua.
func (s *Store) Capture(ctx context.Context, l *Lease, callID string, amount Micros) error {
	if amount < 0 || amount > maxMicros {
		return fmt.Errorf("capture %d micro-dollars for call %.128q of %s: %w", amount, callID, l.Run, ErrRange)
	}
	if err := s.closeCall(ctx, l, callID, amount, "c"); err != nil {
		return fmt.Errorf("capture %s for call %.128q of %s: %w", amount, callID, l.Run, err)
	}
	return nil
}

// Void gives back all that was set aside for a call. Again changes nothing; after a capture it is ErrState. Other errors
// as of Capture.
//
// Script capture.lua.
func (s *Store) Void(ctx context.Context, l *Lease, callID string) error {
	if err := s.closeCall(ctx, l, callID, 0, "v"); err != nil {
		return fmt.Errorf("void call %.128q of %s: %w", callID, l.Run, err)
	}
	return nil
}

func (s *Store) closeCall(ctx context.Context, l *Lease, callID string, amount Micros, state string) error {
	if !callPattern.MatchString(callID) {
		return ErrNotFound
	}
	id := string(l.Run)
	r, err := s.eval(ctx, captureScript, []string{s.keys.run(id), s.keys.calls(id), s.keys.runEvents(id)},
		l.Token, callID, int64(amount), state, s.keys.events(), id, s.micros())
	if err != nil {
		return err
	}
	return refused(r)
}
