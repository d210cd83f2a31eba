package pool

import "container/list"

// enready puts a machine among the ready ones, ordered by age: one that a cancelled claim gave back is not the newest.
func (p *policy[M]) enready(s *slot[M]) {
	s.state = slotReady
	s.shelf = &p.ready
	if s.generation != p.generation {
		s.shelf = &p.outdated
	}
	for el := s.shelf.Back(); el != nil; el = el.Prev() {
		if !el.Value.(*slot[M]).madeAt.After(s.madeAt) {
			s.el = s.shelf.InsertAfter(s, el)
			return
		}
	}
	s.el = s.shelf.PushFront(s)
}

// readyLen is the number of machines that a claim could get.
func (p *policy[M]) readyLen() int { return p.ready.Len() + p.outdated.Len() }

// next is the machine that the next claim gets: the oldest of the current template or, while there is none, of an earlier
// one; nil: none is ready.
func (p *policy[M]) next() *slot[M] {
	for _, shelf := range []*list.List{&p.ready, &p.outdated} {
		if el := shelf.Front(); el != nil {
			return el.Value.(*slot[M])
		}
	}
	return nil
}

// last is the machine that can be missed most: one of an earlier template, or the oldest.
func (p *policy[M]) last() *slot[M] {
	for _, shelf := range []*list.List{&p.outdated, &p.ready} {
		if el := shelf.Front(); el != nil {
			return el.Value.(*slot[M])
		}
	}
	return nil
}

// swap makes every machine made so far one of an earlier template. They stay in service until those of the new one are
// ready, so that claims see no gap.
func (p *policy[M]) swap() {
	p.generation++
	p.circuit.renew()
	for el := p.ready.Front(); el != nil; el = p.ready.Front() {
		s := el.Value.(*slot[M])
		p.unready(s)
		p.enready(s)
	}
}

// cramped tells whether machines of an earlier template stand in the way of their own replacement.
func (p *policy[M]) cramped() bool {
	full := p.live() >= p.cfg.MaxMachines || p.refused != nil || p.share.short()
	return p.outdated.Len() > 0 && full && p.ready.Len()-p.stale < p.target() && p.making == 0 && p.circuit.healthy()
}

func (p *policy[M]) unready(s *slot[M]) {
	if s.el == nil {
		return
	}
	s.shelf.Remove(s.el)
	s.el, s.shelf = nil, nil
	if s.stale {
		s.stale = false
		p.stale--
	}
}

// most is the number of ready machines above which some are given up. A scaler's target holds for a while by itself.
func (p *policy[M]) most() int {
	if p.scaler != nil {
		return p.target()
	}
	return p.cfg.MaxReady
}

// trim retires what is above the limits, machines that have their replacement or stand in its way, and those whose room is
// needed by claims that wait for a machine of another pool.
func (p *policy[M]) trim() {
	doomed := len(p.retired) + p.destroying
	for s := p.last(); s != nil; s = p.last() {
		over := p.readyLen() > p.most() || p.live()-doomed > p.cfg.MaxMachines
		replaced := (s.stale || s.generation != p.generation) && p.readyLen() > p.target()
		if !over && !replaced && !(doomed == 0 && p.cramped()) && !p.share.mustGive() {
			return
		}
		p.unready(s)
		p.retire(s)
		p.totals.Surplus++
		doomed++
	}
}
