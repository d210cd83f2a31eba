package run

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// line plays a node of a few slots and clients that come back when they are told, in the time of the store's clock.
type line struct {
	*fixture
	slots   int
	service func() time.Duration
	working []working
	takes   []time.Time
	waited  map[ID]time.Duration // of those taken
}

type working struct {
	lease *Lease
	ends  time.Time
}

// pass lets the time pass to the given moment.
func (l *line) pass(to time.Time) {
	for {
		i := -1
		for j, w := range l.working {
			if !w.ends.After(to) && (i < 0 || w.ends.Before(l.working[i].ends)) {
				i = j
			}
		}
		if i < 0 {
			break
		}
		w := l.working[i]
		l.working = slices.Delete(l.working, i, i+1)
		l.clock.us.Store(w.ends.UnixMicro())
		l.must(second(l.Settle(l.ctx, w.lease, Outcome{At: w.ends, State: Succeeded})))
		l.fill()
	}
	l.clock.us.Store(to.UnixMicro())
	l.fill()
}

// fill takes runs while there are slots.
func (l *line) fill() {
	l.must(l.Announce(l.ctx, Node{ID: "n1", Slots: l.slots}))
	for len(l.working) < l.slots {
		lease, err := l.tryTake(l.ctx, "n1")
		l.must(err)
		if lease == nil {
			return
		}
		l.must(l.Start(l.ctx, lease, Start{At: l.clock.now(), Machine: "m", Image: "i", Isolation: "kvm"}))
		l.takes = append(l.takes, l.clock.now())
		l.waited[lease.Run] = l.clock.now().Sub(lease.QueuedAt)
		l.working = append(l.working, working{lease, l.clock.now().Add(l.service())})
	}
}

func (l *line) post(org string) (Run, error) {
	r, _, err := l.Admit(l.ctx, Admission{Org: org, Spec: Spec{Command: "true", MaxCostMicros: 1}})
	return r, err
}

func newLine(t *testing.T, slots, queue int, service func() time.Duration, change ...func(*Config)) *line {
	l := &line{slots: slots, service: service, waited: map[ID]time.Duration{}, fixture: newFixture(t, append(change, func(c *Config) {
		c.QueueLimit = queue
	})...)}
	l.newOrg("o", 1000, 1_000_000)
	for range 3 * slots { // from which it learns how long runs take
		l.must(second(l.post("o")))
		l.pass(l.clock.now().Add(time.Second))
	}
	l.pass(l.clock.now().Add(time.Hour))
	return l
}

func within(got, want, share float64) bool { return math.Abs(got-want) <= share*want+0.001 }

// A burst on four slots: each waiting run is told its wait, each refused request when there is room for it, and it is let
// in when it comes then.
func TestWaitsToldInABurst(t *testing.T) {
	l := newLine(t, 4, 40, func() time.Duration { return 10 * time.Second })
	start := l.clock.now()
	told := map[ID]float64{}
	var again []time.Duration
	for i := range 60 {
		r, err := l.post("o")
		var full *QueueFullError
		switch {
		case errors.As(err, &full):
			again = append(again, full.RetryAfter)
		case err != nil:
			t.Fatal(err)
		default:
			if r.Queue == nil || r.Queue.Wait == nil {
				t.Fatalf("run %d is told nothing: %+v", i, r.Queue)
			}
			told[r.ID] = *r.Queue.Wait / 1000
			events, _, err := l.Events(l.ctx, "o", r.ID, 0)
			l.must(err)
			l.same(events[0].Data.(QueuedData).Place, *r.Queue)
		}
		if i == 3 {
			l.fill() // these four are taken at once, the rest of the burst waits
		}
	}
	if len(again) != 60-4-40 {
		t.Fatalf("%d are refused, want %d", len(again), 60-4-40)
	}
	before := len(l.takes)
	for i, d := range again {
		// What a client is told in whole seconds.
		at := start.Add(time.Duration(math.Ceil(d.Seconds())) * time.Second)
		l.pass(at)
		if _, err := l.post("o"); err != nil {
			t.Errorf("the request that was refused as number %d comes when it is told, after %v: %v", i, d, err)
		}
	}
	l.pass(start.Add(time.Hour))
	for i, d := range again {
		if free := l.takes[before+i].Sub(start).Seconds(); !within(d.Seconds(), free, 0.2) {
			t.Errorf("refused as number %d: told %.1f s, there is room after %.1f s", i, d.Seconds(), free)
		}
	}
	for id, seconds := range told {
		if got := l.waited[id].Seconds(); !within(seconds, got, 0.2) {
			t.Errorf("%s was told %.1f s and waited %.1f s", id, seconds, got)
		}
	}
}

// Runs of random length: the estimates are right on average.
func TestWaitsToldOfRandomRuns(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	l := newLine(t, 5, 1000, func() time.Duration { return time.Duration(random.ExpFloat64() * float64(10*time.Second)) })
	var told, got float64
	var ids []ID
	for range 10 {
		for range 60 {
			r, err := l.post("o")
			l.must(err)
			l.fill()
			told += *r.Queue.Wait / 1000
			ids = append(ids, r.ID)
		}
		l.pass(l.clock.now().Add(time.Hour))
	}
	for _, id := range ids {
		got += l.waited[id].Seconds()
	}
	if !within(told, got, 0.2) {
		t.Errorf("told %.0f s in all, waited %.0f s", told, got)
	}
}

// The wait shrinks while the time passes, the position with every run that is taken, and both are gone when it starts.
func TestPlaceInTheRecord(t *testing.T) {
	l := newLine(t, 1, 100, func() time.Duration { return 10 * time.Second })
	var ids []ID
	for range 4 {
		r, err := l.post("o")
		l.must(err)
		l.fill()
		ids = append(ids, r.ID)
	}
	start := l.clock.now()
	for _, tt := range []struct {
		after    time.Duration
		position int64
		wait     float64
	}{{0, 3, 30}, {4 * time.Second, 3, 26}, {10 * time.Second, 2, 20}, {25 * time.Second, 1, 5}, {30 * time.Second, 0, 0}} {
		l.pass(start.Add(tt.after))
		r, err := l.Get(l.ctx, "o", ids[3])
		l.must(err)
		if tt.position == 0 {
			if r.Queue != nil {
				t.Errorf("after %v: %+v, want none", tt.after, r.Queue)
			}
			continue
		}
		if r.Queue == nil || r.Queue.Position != tt.position || r.Queue.Wait == nil || !within(*r.Queue.Wait/1000, tt.wait, 0.05) {
			t.Errorf("after %v: %s, want place %d and %v s", tt.after, showPlace(r.Queue), tt.position, tt.wait)
		}
	}
}

// Organisations take turns: a second one's only run passes the first one's queue, and that is what it is told. The limit on
// runs at once of an organisation counts too.
func TestPlaceAmongOrganisations(t *testing.T) {
	l := newLine(t, 2, 100, func() time.Duration { return 10 * time.Second })
	l.newOrg("other-one", 0, 1000)
	l.newOrg("narrow", 1, 1000)
	for range 22 {
		l.must(second(l.post("o")))
	}
	l.fill()
	r, err := l.post("other-one")
	l.must(err)
	if r.Queue == nil || *r.Queue.Wait > 10_000 {
		t.Errorf("the only run of an organisation is told %s behind another's 20", showPlace(r.Queue))
	}
	var last Run
	for range 4 {
		last, err = l.post("narrow")
		l.must(err)
	}
	told := *last.Queue.Wait / 1000
	l.pass(l.clock.now().Add(time.Hour))
	if got := l.waited[last.ID].Seconds(); !within(told, got, 0.35) { // how long its others will be held up is not known
		t.Errorf("told %.1f s, waited %.1f s", told, got)
	}
}

// Nothing is invented: with no run to learn from no wait is told.
func TestNoEstimateWithoutExperience(t *testing.T) {
	f := newFixture(t, func(c *Config) { c.QueueLimit = 1 })
	f.newOrg("o", 1, 1000)
	f.admit("o", 1)
	f.take()
	r, _, err := f.Admit(f.ctx, Admission{Org: "o", Spec: Spec{Command: "true", MaxCostMicros: 1}})
	f.must(err)
	if r.Queue == nil || r.Queue.Position != 1 || r.Queue.Wait != nil {
		t.Errorf("told %s", showPlace(r.Queue))
	}
	_, _, err = f.Admit(f.ctx, Admission{Org: "o", Spec: Spec{Command: "true", MaxCostMicros: 1}})
	var full *QueueFullError
	if !errors.As(err, &full) || !errors.Is(err, ErrQueueFull) || full.RetryAfter != 0 {
		t.Errorf("refused with %v", err)
	}
	if err := f.Announce(f.ctx, Node{ID: "n 1", Slots: 1}); !errors.Is(err, ErrRange) {
		t.Errorf("announcement of a node without a name: %v", err)
	}
}

func showPlace(p *Place) string {
	switch {
	case p == nil:
		return "nothing"
	case p.Wait == nil:
		return fmt.Sprintf("place %d", p.Position)
	}
	return fmt.Sprintf("place %d, %.1f s", p.Position, *p.Wait/1000)
}
