package provision

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/ephemeral-run/ephemeral/vmm"
)

// spares are launched, jailed, empty VMMs: they have everything that a machine has but a guest. A creation that takes one
// starts at the load.
type spares struct {
	mu        sync.Mutex
	byKey     map[string][]*creation // by key of the template
	launching map[string]bool
	closed    bool
	stop      context.Context // ends launches when the provisioner is closed
	end       context.CancelFunc
}

// spareLimit bounds the launch of a spare.
const spareLimit = 30 * time.Second

func newSpares() *spares {
	s := &spares{byKey: map[string][]*creation{}, launching: map[string]bool{}}
	s.stop, s.end = context.WithCancel(context.Background())
	return s
}

// Spares is how many spares of a template are in hand.
func (p *Provisioner) Spares(t vmm.Template) int {
	p.spares.mu.Lock()
	defer p.spares.mu.Unlock()
	return len(p.spares.byKey[t.Key])
}

// takeSpare gives a spare of this very template that still lives; nil: there is none.
func (p *Provisioner) takeSpare(t vmm.Template) *creation {
	for {
		p.spares.mu.Lock()
		all := p.spares.byKey[t.Key]
		if len(all) == 0 {
			p.spares.mu.Unlock()
			return nil
		}
		c := all[0]
		p.spares.byKey[t.Key] = all[1:]
		p.spares.mu.Unlock()
		select {
		case <-c.empty.Done():
		default:
			if c.template.MadeAt.Equal(t.MadeAt) {
				return c
			}
		}
		p.scrap(c)
	}
}

// scrap removes a spare. That nothing is left of it is checked where provisioners are closed; see also Reconcile.
func (p *Provisioner) scrap(c *creation) {
	if err := p.left(c.cleanup.run(closeLimit)); err != nil {
		p.spares.mu.Lock()
		p.scrapErr = errors.Join(p.scrapErr, err)
		p.spares.mu.Unlock()
	}
}

// restock launches spares of the template, one after the other, until there are Config.Spares. It does not wait for them. A
// launch that fails is not repeated before the next creation: that one tells why.
func (p *Provisioner) restock(t vmm.Template) {
	_, ok := p.driver.(vmm.EmptyLauncher)
	if !ok || p.config.Spares == 0 || p.distrusted(t.Key) || p.begin() != nil {
		return
	}
	s := p.spares
	s.mu.Lock()
	if s.closed || s.launching[t.Key] || len(s.byKey[t.Key]) >= p.config.Spares {
		s.mu.Unlock()
		p.busy.Done()
		return
	}
	s.launching[t.Key] = true
	s.mu.Unlock()
	go func() {
		defer p.busy.Done()
		for p.launchSpare(t) {
		}
	}()
}

// launchSpare launches one spare and tells whether another one is wanted. It is admitted like a machine, since it is to be
// one.
func (p *Provisioner) launchSpare(t vmm.Template) (more bool) {
	s := p.spares
	ctx, cancel := context.WithTimeout(s.stop, spareLimit)
	defer cancel()
	c := &creation{parts: p.newParts(), template: t}
	err := p.Admit()
	if err == nil {
		err = c.launch(ctx)
	}
	s.mu.Lock()
	if err == nil && !s.closed {
		s.byKey[t.Key] = append(s.byKey[t.Key], c)
		if more = len(s.byKey[t.Key]) < p.config.Spares; !more {
			s.launching[t.Key] = false
		}
		s.mu.Unlock()
		return more
	}
	s.launching[t.Key] = false
	s.mu.Unlock()
	p.scrap(c)
	return false
}

// dropSpares removes the spares of a template, since its files go.
func (p *Provisioner) dropSpares(key string) {
	p.spares.mu.Lock()
	all := p.spares.byKey[key]
	delete(p.spares.byKey, key)
	p.spares.mu.Unlock()
	for _, c := range all {
		p.scrap(c)
	}
}

// endSpares ends launches and refuses further ones; closeSpares, once those have ended, removes all.
func (p *Provisioner) endSpares() {
	p.spares.mu.Lock()
	p.spares.closed = true
	p.spares.mu.Unlock()
	p.spares.end()
}

func (p *Provisioner) closeSpares() error {
	p.spares.mu.Lock()
	var all []*creation
	for _, list := range p.spares.byKey {
		all = append(all, list...)
	}
	clear(p.spares.byKey)
	p.spares.mu.Unlock()
	var closing sync.WaitGroup
	for _, c := range all {
		closing.Go(func() { p.scrap(c) })
	}
	closing.Wait()
	p.spares.mu.Lock()
	defer p.spares.mu.Unlock()
	return p.scrapErr
}
