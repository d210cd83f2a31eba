package run

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// Bounds of what a run leaves.
const (
	maxStreamBytes = 16 << 20 // of output, stdout and stderr each
	inlineBytes    = 1 << 20  // larger streams are written piece by piece ahead of the settlement
	pieceBytes     = 1 << 20
	putLife        = time.Hour // of pieces that no settlement adopts
)

var settleScript, putScript, cancelScript = loadScript("settle"), loadLax("put"), loadScript("cancel")

// closingData is how a run ends that no worker reported on: the data of the event named after its state, and what the
// record keeps.
type closingData struct{ data, outcome string }

func closingFor(e *Error, u Usage) closingData {
	return closingData{
		data:    mustEncode(EndedData{ModelCalls: u.ModelCalls, Tokens: u.TotalTokens, Error: e}),
		outcome: mustEncode(outcome{Usage: u, Error: e}),
	}
}

var (
	endedCancelled   = closingFor(nil, Usage{})
	endedContentLost = closingFor(&Error{Code: "content_lost",
		Detail: "the request was kept in memory only (zero data retention) and the store lost it before a node could take the run"}, Usage{})
)

// Settle ends a run: terminal state, event of that name, the hold turned into charge and release, event
// worker.destroyed with the money, results stored, all in one step. What calls still had set aside is released. The
// record's stages are o.Stages and "settle", which takes up the rest until worker.destroyed; EndedAt is that moment.
// Settling again returns the settled run as it is, whatever o says. Errors: ErrLeaseLost (another life owns or ended the
// run), ErrState (a TransitionError: a run that never started can neither succeed nor time out), ErrRange (no terminal state, or a stream above 16 MiB), ErrUnavailable.
//
// Scripts put.lua and settle.lua.
func (s *Store) Settle(ctx context.Context, l *Lease, o Outcome) (Run, error) {
	fail := func(err error) (Run, error) { return Run{}, fmt.Errorf("settle %s as %.20s: %w", l.Run, o.State, err) }
	if !o.State.Terminal() {
		return fail(fmt.Errorf("not a terminal state: %w", ErrRange))
	}
	zdr := l.Spec.ZeroDataRetention
	streams, err := resultStreams(o.Result, zdr)
	if err != nil {
		return fail(err)
	}
	args, err := s.settleArgs(l, o, zdr)
	if err != nil {
		return fail(err)
	}
	for attempt := 0; ; attempt++ {
		placed, err := s.place(ctx, l, streams)
		if err != nil {
			return fail(err)
		}
		r, err := s.eval(ctx, settleScript, s.keys.closing(l.Org, string(l.Run)), append(args, placed...)...)
		if err != nil {
			return fail(err)
		}
		if r.code() == "SHORT" && attempt < 2 {
			continue
		}
		if r.code() == "AGAIN" {
			return s.Get(ctx, l.Org, l.Run)
		}
		if err := moved(r, l.Run, o.State); err != nil {
			return fail(err)
		}
		return settled(l, o, r, zdr)
	}
}

// settled is the run as it was just settled, with the content that the caller has at hand.
func settled(l *Lease, o Outcome, r reply, zdr bool) (Run, error) {
	done, err := decodeRun(l.Run, r.fields(1))
	if err != nil {
		return Run{}, err
	}
	if !zdr {
		spec := l.Spec
		done.Request, done.Result = &spec, o.Result
	}
	return done, nil
}

// settleArgs are the arguments of settle.lua before the streams.
func (s *Store) settleArgs(l *Lease, o Outcome, zdr bool) ([]any, error) {
	ended := EndedData{ModelCalls: o.Usage.ModelCalls, Tokens: o.Usage.TotalTokens, Error: o.Error}
	if o.Result != nil {
		ended.Output, ended.ExitCode = o.Result.Output, o.Result.ExitCode
	}
	stored, err := encode("ended event", ended)
	if err != nil {
		return nil, err
	}
	live := ""
	if zdr {
		live, stored = stored, mustEncode(bareData(ended))
	}
	kept := newOutcome(o, zdr)
	record, err := encode("outcome", kept)
	if err != nil {
		return nil, err
	}
	now := s.micros()
	at := now
	if !o.At.IsZero() {
		at = o.At.UnixMicro()
	}
	return []any{s.keys.events(), s.keys.work(), string(l.Run), l.Token, string(o.State), at, now, kept.sum(), stored, live,
		record, s.cfg.Retention.Milliseconds(), s.cfg.Concurrency}, nil
}

// resultStreams are the bytes of output, stdout and stderr to store; under zero data retention none.
func resultStreams(res *Result, zdr bool) (streams [3][]byte, err error) {
	if res == nil || zdr {
		return streams, nil
	}
	streams[0] = []byte(res.Output)
	var err1, err2 error
	streams[1], err1 = res.Stdout.bytes()
	streams[2], err2 = res.Stderr.bytes()
	if err := errors.Join(err1, err2); err != nil {
		return streams, fmt.Errorf("result: %w: %w", ErrRange, err)
	}
	for _, b := range streams {
		if len(b) > maxStreamBytes {
			return streams, fmt.Errorf("result of %d bytes, at most %d are kept: %w", len(b), maxStreamBytes, ErrRange)
		}
	}
	return streams, nil
}

// place writes large streams to Redis, in pieces so that nobody else has to wait for them, and returns the arguments
// that tell settle.lua where the three streams are.
func (s *Store) place(ctx context.Context, l *Lease, streams [3][]byte) ([]any, error) {
	id := string(l.Run)
	names := [3]string{s.keys.output(id), s.keys.stdout(id), s.keys.stderr(id)}
	total := len(streams[0]) + len(streams[1]) + len(streams[2])
	var args []any
	for i, b := range streams {
		switch {
		case len(b) == 0:
			args = append(args, "none", "")
		case total <= inlineBytes:
			args = append(args, "here", b)
		default:
			if err := s.put(ctx, l, names[i], b); err != nil {
				return nil, err
			}
			args = append(args, "put", len(b))
		}
	}
	return args, nil
}

func (s *Store) put(ctx context.Context, l *Lease, name string, b []byte) error {
	for at := 0; at < len(b); at += pieceBytes {
		r, err := s.eval(ctx, putScript, []string{s.keys.run(string(l.Run)), name},
			l.Token, at, b[at:min(at+pieceBytes, len(b))], putLife.Milliseconds())
		if err == nil {
			err = refused(r)
		}
		if errors.Is(err, ErrLeaseLost) {
			return nil // settled already, or lost: settle.lua decides which
		}
		if err != nil {
			return fmt.Errorf("store result: %w", err)
		}
	}
	return nil
}

// Cancel ends a queued run at once; of a leased one it asks the node to end it; an ended one stays as it is. It returns
// the run as it is then. ErrNotFound as for Get.
//
// Script cancel.lua.
func (s *Store) Cancel(ctx context.Context, org string, id ID) (Run, error) {
	owner, err := s.owner(ctx, org, id)
	if err != nil {
		return Run{}, fmt.Errorf("cancel: %w", err)
	}
	r, err := s.eval(ctx, cancelScript, s.keys.closing(owner, string(id)),
		s.keys.events(), s.keys.work(), s.keys.cancels(), string(id), owner, s.micros(),
		s.cfg.Retention.Milliseconds(), s.cfg.Concurrency, endedCancelled.data, endedCancelled.outcome)
	if err == nil {
		err = refused(r)
	}
	if err != nil {
		return Run{}, fmt.Errorf("cancel %s: %w", id, err)
	}
	if r.text(2) == "1" {
		s.endedHere(ctx, owner, id)
	}
	return s.Get(ctx, owner, id)
}
