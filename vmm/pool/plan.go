package pool

import (
	"container/list"
	"time"
)

// ticket goes with a make, from its start to its end.
type ticket struct {
	epoch      int       // circuit.epoch when it started
	generation int       // of the template it is made from
	since      time.Time // when it was wanted and nothing but a burst of claims was in its way
}

// plan is what is to be started now, and when to ask again.
type plan[M Machine] struct {
	makes    int
	ticket   ticket // of the makes
	destroys []*slot[M]
	warms    []*slot[M]
	next     time.Time // zero: only when something happens
}

// at notes a time at which to ask again.
func (pl *plan[M]) at(t time.Time) {
	if pl.next.IsZero() || t.Before(pl.next) {
		pl.next = t
	}
}

// plan decides what to start and counts it as started.
func (p *policy[M]) plan(now time.Time) plan[M] {
	var pl plan[M]
	p.scale(now, &pl)
	if target := p.target(); target != p.journal.target {
		p.journal.moved(now, target, p.reason())
	}
	p.age(now, &pl)
	p.trim()
	want := p.wanted()
	if p.yields(now) && (want > 0 || len(p.retired) > 0) {
		if want > 0 && p.stoodBack.IsZero() {
			p.stoodBack = now
		}
		pl.at(p.yieldUntil)
		return pl
	}
	for len(p.retired) > 0 && p.destroying < destroyConcurrency {
		pl.destroys = append(pl.destroys, p.retired[0])
		p.retired[0] = nil
		p.retired = p.retired[1:]
		p.destroying++
	}
	since := now
	if !p.stoodBack.IsZero() {
		since, p.stoodBack = p.stoodBack, time.Time{}
	}
	pl.makes = p.start(now, want, &pl)
	pl.ticket = ticket{epoch: p.circuit.epoch, generation: p.generation, since: since}
	p.exercise(now, &pl)
	return pl
}

// age marks machines whose replacement is due and retires those past their age.
func (p *policy[M]) age(now time.Time, pl *plan[M]) {
	if p.cfg.MaxAge <= 0 {
		return
	}
	p.ageShelf(&p.outdated, now, pl)
	p.ageShelf(&p.ready, now, pl)
}

func (p *policy[M]) ageShelf(shelf *list.List, now time.Time, pl *plan[M]) {
	lead := p.cfg.MaxAge / 10
	if shelf == &p.outdated {
		lead = 0 // their replacement is due anyway
	}
	for el := shelf.Front(); el != nil; {
		s := el.Value.(*slot[M])
		el = el.Next()
		end := s.madeAt.Add(p.cfg.MaxAge)
		switch {
		case !now.Before(end):
			p.usable(s, now)
			continue
		case now.Before(end.Add(-lead)):
			pl.at(end.Add(-lead))
			return // the others are younger
		case !s.stale:
			s.stale = true
			p.stale++
		}
		pl.at(end)
	}
}

// yields tells whether refill and destruction stand back for a burst of claims. They do not when claims wait, for then
// there is nothing ready to serve them with; and never for longer than Config.Yield, so that steady load cannot starve
// the refill.
func (p *policy[M]) yields(now time.Time) bool {
	return p.serving > 0 && now.Before(p.yieldUntil) && p.waiters.Len() == 0 && !p.closed
}

// wanted is how many machines are to be made beyond those being made.
func (p *policy[M]) wanted() int {
	if p.closed {
		return 0
	}
	refill := max(0, p.target()-(p.ready.Len()-p.stale+p.warming))
	return max(0, p.waiters.Len()+refill-p.making)
}

// start decides how many of the wanted machines are made now.
func (p *policy[M]) start(now time.Time, want int, pl *plan[M]) int {
	claims := max(0, p.waiters.Len()-p.making) // makes that claims wait for
	want = min(want, p.cfg.RefillConcurrency-p.making, p.cfg.MaxMachines-p.live())
	if want <= 0 {
		p.share.starve(0)
		return 0
	}
	if now.Before(p.refusedEnd) {
		p.share.starve(0)
		pl.at(p.refusedEnd)
		return 0
	}
	p.refused = nil
	if now.Before(p.circuit.until) {
		pl.at(p.circuit.until)
	}
	want = p.circuit.lets(now, want)
	n := p.share.take(want, min(claims, want))
	p.circuit.let(n)
	p.making += n
	return n
}

// over tells whether a closed pool has nothing left to do.
func (p *policy[M]) over() bool {
	return p.closed && p.making == 0 && p.warming == 0 && p.offered == 0 && len(p.retired) == 0 && p.destroying == 0
}
