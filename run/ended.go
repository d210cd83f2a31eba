package run

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
)

// WithEnded has the store tell f of each run that ended by a call to it and that no node settled: cancelled before a node
// had it or by a node that gave it back, with a node that is gone, or without its request. f gets the record and the events as
// they are stored, and must be quick: the call waits for it. No run is told twice; one is not told whose record cannot be
// read just then, or whose end was acknowledged only when the call was repeated.
func WithEnded(f func(Run, []Event)) Option { return func(s *Store) { s.onEnded = f } }

// endedHere tells that this process ended the run.
func (s *Store) endedHere(ctx context.Context, org string, id ID) {
	if s.onEnded == nil {
		return
	}
	record, events, err := s.readBack(ctx, org, id)
	if err != nil {
		slog.DebugContext(ctx, "a run that ended cannot be told of", "run", id, "error", err)
		return
	}
	s.onEnded(record, events)
}

// allEndedHere does so for "org id org id ...", as take.lua lists them.
func (s *Store) allEndedHere(ctx context.Context, list string) {
	words := strings.Fields(list)
	for i := 0; i+1 < len(words); i += 2 {
		s.endedHere(ctx, words[i], ID(words[i+1]))
	}
}

// readBack reads the run with all its events.
func (s *Store) readBack(ctx context.Context, org string, id ID) (Run, []Event, error) {
	record, err := s.Get(ctx, org, id)
	if err != nil {
		return Run{}, nil, fmt.Errorf("read the run: %w", err)
	}
	var all []Event
	for more, after := true, int64(0); more; {
		var page []Event
		if page, more, err = s.Events(ctx, org, id, after); err != nil {
			return Run{}, nil, err
		}
		if len(page) == 0 {
			break
		}
		all, after = append(all, page...), page[len(page)-1].Seq
	}
	return record, all, nil
}
