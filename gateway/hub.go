package gateway

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/ephemeral-run/ephemeral/run"
)

// Bounds of what one reader may have waiting. A reader that falls further behind is cut off; it resumes from the store
// with its Last-Event-ID.
const (
	maxWaitingFrames = 256
	maxWaitingBytes  = 1 << 20
)

// Delays between attempts to subscribe while the store does not answer.
const (
	minResubscribe = 100 * time.Millisecond
	maxResubscribe = 5 * time.Second
)

// lingers is how long the subscription to events outlives its last reader, at least.
const lingers = 15 * time.Second

// hub holds the gateway's one subscription to events and hands each event to the readers of its run. It never waits
// for a reader. Without readers there is no such subscription: every event of the cell would come, for nobody.
type hub struct {
	store   Store
	log     *slog.Logger
	lingers time.Duration
	wanted  chan struct{} // a signal waits here when a reader has come

	mu      sync.Mutex
	readers map[run.ID]map[*reader]struct{}
	count   int
	drained bool
	up      chan struct{} // closed while there is a subscription
}

func newHub(store Store, log *slog.Logger) *hub {
	return &hub{store: store, log: log, lingers: lingers, wanted: make(chan struct{}, 1), up: make(chan struct{}),
		readers: map[run.ID]map[*reader]struct{}{}}
}

// run keeps the subscription to events while there are readers, until ctx ends.
func (h *hub) run(ctx context.Context) {
	h.keep(ctx, "event", func() (n int, err error) {
		for h.size() == 0 {
			select {
			case <-ctx.Done():
				return 0, nil
			case <-h.wanted:
			}
		}
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		events, gap, err := h.store.Subscribe(ctx, h.followed)
		if err != nil {
			return 0, err
		}
		h.markGap() // whoever came before may have missed something
		h.mu.Lock()
		close(h.up)
		h.mu.Unlock()
		n = h.relay(ctx, events, gap)
		h.down(func() bool { return true })
		return n, nil
	})
}

// runRevocations tells the readers of an organisation that revokes something to ask whether they may still read, until ctx
// ends. What it misses they find out with their next heartbeat.
func (h *hub) runRevocations(ctx context.Context) {
	h.keep(ctx, "revocation", func() (n int, err error) {
		orgs, err := h.store.Revocations(ctx)
		if err != nil {
			return 0, err
		}
		h.recheck("") // it was not told what was revoked before
		for org := range orgs {
			n++
			h.recheck(org)
		}
		return n, nil
	})
}

// keep makes a subscription again and again until ctx ends. follow serves one until it breaks and returns how much came.
func (h *hub) keep(ctx context.Context, what string, follow func() (int, error)) {
	delay := minResubscribe
	for ctx.Err() == nil {
		n, err := follow()
		if n > 0 {
			delay = minResubscribe
		}
		if err != nil && ctx.Err() == nil {
			h.log.Warn(what+" subscription failed, trying again", "error", err, "delay", delay)
		}
		select {
		case <-ctx.Done():
		case <-time.After(delay):
		}
		delay = min(2*delay, maxResubscribe)
	}
}

// down says that there is no subscription, if so decides, and returns whether it does. A reader that joins later waits.
func (h *hub) down(decides func() bool) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !decides() {
		return false
	}
	select {
	case <-h.up:
		h.up = make(chan struct{})
	default: // said already
	}
	return true
}

// ready waits until events come to a reader that has joined, at most until ctx ends. What was before is for the caller to read
// then.
func (h *hub) ready(ctx context.Context, r *reader) {
	h.mu.Lock()
	up := h.up
	h.mu.Unlock()
	select {
	case <-up:
		r.mu.Lock()
		r.gap = false
		r.mu.Unlock()
	case <-ctx.Done():
	}
}

// relay hands out events until the subscription ends or was without readers for a while, and returns how many there were; at
// least one of a subscription that was not broken.
func (h *hub) relay(ctx context.Context, events <-chan run.Event, gap <-chan struct{}) (n int) {
	look := time.NewTicker(h.lingers)
	defer look.Stop()
	for idle := false; ; {
		select {
		case <-ctx.Done():
			return n
		case <-look.C:
			if idle && h.down(func() bool { return h.count == 0 }) {
				return max(n, 1)
			}
			idle = h.size() == 0
		case ev, ok := <-events:
			if !ok {
				return n
			}
			n++
			h.publish(ev)
		case _, ok := <-gap:
			if !ok {
				gap = nil
				continue
			}
			h.markGap()
		}
	}
}

// followed tells whether anybody reads the run's events. Who joins after that reads what is stored.
func (h *hub) followed(id run.ID) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.readers[id]) > 0
}

// publish gives the event to its run's readers. It is encoded once for all of them.
func (h *hub) publish(ev run.Event) {
	h.mu.Lock()
	defer h.mu.Unlock()
	readers := h.readers[ev.Run]
	if len(readers) == 0 {
		return
	}
	f, err := encodeFrame(ev)
	if err != nil {
		h.log.Error("event cannot be shown", "run", ev.Run, "seq", ev.Seq, "error", err)
		return
	}
	for r := range readers {
		r.push(f)
	}
}

// markGap tells every reader to read again what is stored.
func (h *hub) markGap() {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, readers := range h.readers {
		for r := range readers {
			r.signal(func() { r.gap = true })
		}
	}
}

// recheck tells the readers of the organisation, or all with an empty one, to ask whether they may still read.
func (h *hub) recheck(org string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, readers := range h.readers {
		for r := range readers {
			if org == "" || r.org == org {
				r.signal(func() { r.recheck = true })
			}
		}
	}
}

// drain ends every reader, present and future.
func (h *hub) drain() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.drained = true
	for _, readers := range h.readers {
		for r := range readers {
			r.signal(func() { r.drained = true })
		}
	}
}

// join adds a reader of one run's events from now on, by leave of the run's organisation. The caller must leave.
func (h *hub) join(org string, id run.ID) *reader {
	r := &reader{org: org, run: id, wake: make(chan struct{}, 1)}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.readers[id] == nil {
		h.readers[id] = map[*reader]struct{}{}
	}
	h.readers[id][r] = struct{}{}
	h.count++
	select {
	case h.wanted <- struct{}{}:
	default:
	}
	if h.drained {
		r.signal(func() { r.drained = true })
	}
	return r
}

// leave removes the reader.
func (h *hub) leave(r *reader) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.readers[r.run], r)
	if len(h.readers[r.run]) == 0 {
		delete(h.readers, r.run)
	}
	h.count--
}

// size is the number of readers.
func (h *hub) size() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.count
}

// reader is one listener to one run's events.
type reader struct {
	org  string
	run  run.ID
	wake chan struct{} // one signal waits when there is something to take

	mu      sync.Mutex
	waiting []frame
	bytes   int
	cut     bool // fell too far behind
	gap     bool // events may be missing
	drained bool // the gateway is going away
	recheck bool // what lets it read may have been revoked
}

// taken is what a reader finds when it wakes.
type taken struct {
	frames                     []frame
	cut, gap, drained, recheck bool
}

// push adds a frame or, when the reader is too far behind, cuts it off and drops what it had.
func (r *reader) push(f frame) {
	r.signal(func() {
		if r.cut {
			return
		}
		if len(r.waiting) >= maxWaitingFrames || r.bytes > 0 && r.bytes+len(f.text) > maxWaitingBytes {
			r.cut, r.waiting, r.bytes = true, nil, 0
			return
		}
		r.waiting = append(r.waiting, f)
		r.bytes += len(f.text)
	})
}

// signal changes the reader's state and wakes it.
func (r *reader) signal(change func()) {
	r.mu.Lock()
	change()
	r.mu.Unlock()
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

// take empties the reader.
func (r *reader) take() taken {
	r.mu.Lock()
	defer r.mu.Unlock()
	t := taken{frames: r.waiting, cut: r.cut, gap: r.gap, drained: r.drained, recheck: r.recheck}
	r.waiting, r.bytes, r.gap, r.recheck = nil, 0, false, false
	return t
}
