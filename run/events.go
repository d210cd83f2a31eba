package run

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
)

// Bounds of a run's timeline.
const (
	maxEvents    = 50_000
	maxEventData = 4 << 20 // bytes of one event's data as JSON
)

var startScript, appendScript, eventsScript = loadScript("start"), loadLax("append"), loadLax("events")

// Start marks the run as running on a confirmed machine, with the event microvm.ready. The same start again changes
// nothing. ErrLeaseLost: the run is not the caller's; ErrState: it runs on another machine.
//
// Script start.lua.
func (s *Store) Start(ctx context.Context, l *Lease, st Start) error {
	data := mustEncode(MicroVMReadyData{Machine: st.Machine, Image: st.Image, Isolation: st.Isolation})
	r, err := s.eval(ctx, startScript, []string{s.keys.run(string(l.Run)), s.keys.runEvents(string(l.Run))},
		s.keys.events(), string(l.Run), l.Token, st.At.UnixMicro(), st.Machine, st.Image, st.Isolation, data)
	if err == nil {
		err = moved(r, l.Run, Running)
	}
	if err != nil {
		return fmt.Errorf("start %s on machine %s: %w", l.Run, st.Machine, err)
	}
	return nil
}

// Append adds events to the run's timeline, all or none, and publishes them. Their times are moved forward where they
// would go back. An event that was
// appended before, the same in type, time and data, is not appended again: after ErrUnavailable repeat, alone or with more. Events of the life of the run itself (queued, microvm.ready,
// budget.warning, the terminal states, worker.destroyed) belong to other calls: they and events above 4 MiB are ErrRange. ErrQueueFull: the
// timeline has 50,000 events. ErrLeaseLost: the run is not the caller's.
//
// Script append.lua.
func (s *Store) Append(ctx context.Context, l *Lease, events ...NewEvent) error {
	if len(events) == 0 {
		return nil
	}
	args := []any{s.keys.events(), string(l.Run), l.Token, maxEvents}
	for _, e := range events {
		stored, live, err := e.forms(l.Spec.ZeroDataRetention)
		if err != nil {
			return fmt.Errorf("append to %s: %w", l.Run, err)
		}
		args = append(args, e.name(stored), string(e.Type), e.At.UnixMicro(), stored, live)
	}
	id := string(l.Run)
	r, err := s.eval(ctx, appendScript, []string{s.keys.run(id), s.keys.runEvents(id), s.keys.names(id)}, args...)
	if err == nil {
		err = refused(r)
	}
	if err != nil {
		return fmt.Errorf("append %d events to %s: %w", len(events), l.Run, err)
	}
	return nil
}

// name tells the event from all others of its run: two of the same type, time (to the nanosecond) and data are one. It is
// made of what is stored anyway: a hash of content would be a trace of it.
func (e NewEvent) name(stored string) string {
	h := sha256.New()
	fmt.Fprintf(h, "%s %d %s", e.Type, e.At.UnixNano(), stored)
	return hex.EncodeToString(h.Sum(nil)[:10])
}

// forms are the event's data as JSON: as stored, and as published where that differs.
func (e NewEvent) forms(zdr bool) (stored, live string, err error) {
	switch e.Type {
	case EventWorkerStarted, EventModel, EventShell, EventWeb, EventConnection, EventRefused, EventFiles, EventMicroVMDestroyed:
	default:
		return "", "", fmt.Errorf("event %.40q is not appended: %w", e.Type, ErrRange)
	}
	if stored, err = encode("event "+string(e.Type), e.Data); err != nil {
		return "", "", err
	}
	if zdr {
		kept := e.Redacted
		if kept == nil {
			kept = bareData(e.Data)
		}
		live = stored
		if stored, err = encode("event "+string(e.Type), kept); err != nil {
			return "", "", err
		}
	}
	if max(len(stored), len(live)) > maxEventData {
		return "", "", fmt.Errorf("event %s has more than %d bytes: %w", e.Type, maxEventData, ErrRange)
	}
	return stored, live, nil
}

// Bounds of one page of events.
const (
	maxPageEvents = 1000
	maxPageBytes  = 4 << 20 // after which a page ends; the last event may go beyond
)

// Events returns one page of the run's stored events, those with a Seq above after, in order, and whether more follow: at
// most 1000, and no further one once they have 4 MiB as JSON. Their Data has the type that goes with the event's Type.
// ErrNotFound as for Get.
//
// Script events.lua.
func (s *Store) Events(ctx context.Context, org string, id ID, after int64) (events []Event, more bool, err error) {
	fail := func(err error) ([]Event, bool, error) { return nil, false, fmt.Errorf("events of %s: %w", id, err) }
	if _, err := ParseID(string(id)); err != nil {
		return nil, false, fmt.Errorf("events: %w", err)
	}
	r, err := s.eval(ctx, eventsScript, []string{s.keys.run(string(id)), s.keys.runEvents(string(id))}, org, min(max(after, 0), maxEvents),
		maxPageEvents, maxPageBytes)
	if err == nil {
		err = refused(r)
	}
	if err != nil {
		return fail(err)
	}
	lines := r.list(2)
	events = make([]Event, 0, len(lines))
	for _, line := range lines {
		e, err := decodeEvent(line)
		if err != nil {
			return fail(err)
		}
		events = append(events, e)
	}
	return events, r.text(1) == "1", nil
}

// UnmarshalJSON decodes the event with its Data in the type that goes with its Type; Data of an unknown type is kept as
// json.RawMessage.
func (e *Event) UnmarshalJSON(b []byte) error {
	type plain Event
	var raw json.RawMessage
	v := plain{Data: &raw}
	if err := json.Unmarshal(b, &v); err != nil {
		return err
	}
	*e = Event(v)
	e.Data = nil
	if len(raw) == 0 {
		return nil
	}
	data, err := decodeData(e.Type, raw)
	if err != nil {
		return fmt.Errorf("data of event %s: %w", e.Type, err)
	}
	e.Data = data
	return nil
}

func decodeData(t EventType, raw json.RawMessage) (any, error) {
	switch t {
	case EventQueued:
		return decodeAs[QueuedData](raw)
	case EventMicroVMReady:
		return decodeAs[MicroVMReadyData](raw)
	case EventWorkerStarted:
		return decodeAs[WorkerStartedData](raw)
	case EventModel:
		return decodeAs[ModelData](raw)
	case EventShell:
		return decodeAs[ShellData](raw)
	case EventWeb, EventConnection:
		return decodeAs[CallData](raw)
	case EventFiles:
		return decodeAs[FilesData](raw)
	case EventRefused:
		return decodeAs[RefusedData](raw)
	case EventBudgetWarning:
		return decodeAs[BudgetWarningData](raw)
	case EventMicroVMDestroyed:
		return decodeAs[MicroVMDestroyedData](raw)
	case EventWorkerDestroyed:
		return decodeAs[Money](raw)
	}
	if State(t).Terminal() {
		return decodeAs[EndedData](raw)
	}
	return raw, nil
}

func decodeAs[T any](raw json.RawMessage) (any, error) {
	var v T
	err := json.Unmarshal(raw, &v)
	return v, err
}

func decodeEvent(line string) (Event, error) {
	var e Event
	if err := json.Unmarshal([]byte(line), &e); err != nil {
		return Event{}, fmt.Errorf("stored event: %w", err)
	}
	return e, nil
}

// eventBuffer is how many events a subscriber may be behind before it misses some.
const eventBuffer = 8192

// Subscribe returns the events of the cell's runs as they happen, whole, also under zero data retention: of the runs that
// wanted says, which is asked for each event and must not block; nil wants all. One per gateway. The channel closes when ctx ends; gap reports that events may have been missed (the connection broke,
// or the reader was too slow) and readers must re-read with Events. It returns when the subscription is up: what happens
// after that is delivered. Errors: ErrUnavailable, or ctx's.
func (s *Store) Subscribe(ctx context.Context, wanted func(ID) bool) (events <-chan Event, gap <-chan struct{}, err error) {
	out, missed := make(chan Event, eventBuffer), make(chan struct{}, 1)
	report := func() {
		select {
		case missed <- struct{}{}:
		default:
		}
	}
	err = s.subscribe(ctx, s.keys.events(), func(message string) {
		if id, ok := eventRun(message); ok && wanted != nil && !wanted(id) {
			return
		}
		e, err := decodeEvent(message)
		if err != nil {
			report()
			return
		}
		select {
		case out <- e:
		default:
			report()
		}
	}, report, func() { close(out) })
	if err != nil {
		return nil, nil, fmt.Errorf("subscribe to events: %w", err)
	}
	return out, missed, nil
}

// eventRun finds the run of an event as emit writes it (lib.lua), without decoding the rest.
func eventRun(message string) (ID, bool) {
	head, rest, _ := strings.Cut(message, `,"run":"`)
	id, _, ok := strings.Cut(rest, `"`)
	return ID(id), ok && strings.HasPrefix(head, `{"seq":`)
}

// Cancels returns the ids of runs that were asked to cancel, as it happens, until ctx ends. One that is missed while the
// connection is broken is told by Renew. It returns when the subscription is up.
func (s *Store) Cancels(ctx context.Context) (<-chan ID, error) {
	out := make(chan ID, 1024)
	err := s.subscribe(ctx, s.keys.cancels(), func(message string) {
		select {
		case out <- ID(message):
		default: // Renew tells
		}
	}, func() {}, func() { close(out) })
	if err != nil {
		return nil, fmt.Errorf("subscribe to cancellations: %w", err)
	}
	return out, nil
}

// Revocations returns the organisations that revoke a key or a share, as it happens, until ctx ends: whoever was let in
// before asks again with CheckKey or Shared. The empty organisation means any: an admin key was revoked, or the connection was
// broken. What expires is not told. It returns when the subscription is up.
func (s *Store) Revocations(ctx context.Context) (<-chan string, error) {
	out := make(chan string, 1024)
	tell := func(org string) {
		select {
		case out <- org:
		default: // whoever must know asks from time to time as well
		}
	}
	err := s.subscribe(ctx, s.keys.revoked(), tell, func() { tell("") }, func() { close(out) })
	if err != nil {
		return nil, fmt.Errorf("subscribe to revocations: %w", err)
	}
	return out, nil
}

// subscribe follows a channel in a goroutine of the store until ctx ends or the store is closed, and returns when the
// subscription is up. again is called when it was broken and is up again, done at the end.
func (s *Store) subscribe(ctx context.Context, channel string, message func(string), again, done func()) error {
	ctx, cancel := context.WithCancel(ctx)
	stop := context.AfterFunc(s.life, cancel)
	up := make(chan struct{})
	first := true
	s.routines.Go(func() {
		defer cancel()
		defer stop()
		defer done()
		s.follow(ctx, channel, message, func() {
			if first {
				first = false
				close(up)
				return
			}
			again()
		})
	})
	timer := time.NewTimer(dialTimeout + readTimeout)
	defer timer.Stop()
	select {
	case <-up:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		cancel()
		return fmt.Errorf("no answer within %v: %w", dialTimeout+readTimeout, ErrUnavailable)
	}
}

// Health of a subscription: a silent one is asked to answer; one that does not is replaced.
const (
	silence     = 5 * time.Second
	reconnectIn = 100 * time.Millisecond
)

// follow subscribes to a channel and calls message for each message and up each time the subscription has come up, until
// ctx ends. It survives broken connections.
func (s *Store) follow(ctx context.Context, channel string, message func(string), up func()) {
	for ctx.Err() == nil {
		s.followOnce(ctx, channel, message, up)
		select {
		case <-ctx.Done():
		case <-time.After(reconnectIn):
		}
	}
}

// followOnce serves one connection until it breaks or ctx ends.
func (s *Store) followOnce(ctx context.Context, channel string, message func(string), up func()) {
	ps := s.rdb.Subscribe(ctx)
	stop := context.AfterFunc(ctx, func() { ps.Close() })
	defer stop()
	defer ps.Close()
	if err := ps.Subscribe(ctx, channel); err != nil {
		return
	}
	asked := false
	for {
		m, err := ps.ReceiveTimeout(ctx, silence)
		var timeout interface{ Timeout() bool }
		switch {
		case err == nil:
			asked = false
		case errors.As(err, &timeout) && timeout.Timeout() && !asked && ctx.Err() == nil:
			if ps.Ping(ctx) != nil {
				return
			}
			asked = true
			continue
		default:
			return
		}
		switch m := m.(type) {
		case *redis.Subscription:
			up()
		case *redis.Message:
			message(m.Payload)
		}
	}
}
