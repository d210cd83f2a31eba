// Package imagepool holds the pools of a node: one for each image that it serves, which share the node's limits.
package imagepool

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ephemeral-run/ephemeral/node"
	"github.com/ephemeral-run/ephemeral/vmm/provision"
)

// Keeper keeps the template that a pool's machines are made of; *provision.Keeper is one.
type Keeper interface {
	// Ready is nil when there is a template, else a *provision.KeeperError.
	Ready() error
}

// Pool gives ready machines; *pool.Pool of machines is one.
type Pool interface {
	Claim(ctx context.Context) (*provision.Machine, error)
	Settled(m *provision.Machine)
	Released(m *provision.Machine)
	Ready() error
}

// Set is the pools of a node. Its methods are safe for concurrent use.
type Set struct {
	images []string
	pools  map[string]*member

	mu     sync.Mutex
	owners map[*provision.Machine]*member // of machines that were claimed
	takes  map[string]int                 // runs at once, by image
	most   int                            // of all together; 0: no limit
	take   func(runs int)
}

// member is the pool of one image.
type member struct {
	keeper Keeper
	pool   Pool
	begun  atomic.Bool // there was a template: from then on the pool knows best
}

// look is how often a claim looks whether the first template of its image is there.
const look = 250 * time.Millisecond

// New is a set without pools.
func New() *Set {
	return &Set{pools: map[string]*member{}, owners: map[*provision.Machine]*member{}, takes: map[string]int{}}
}

// Add adds the pool of an image. All pools are added before the first claim.
func (s *Set) Add(image string, k Keeper, p Pool) {
	s.images = append(s.images, image)
	s.pools[image] = &member{keeper: k, pool: p}
}

// Claim implements node.Pool. While the first template of the image is being made it waits; it fails when that cannot be made.
// An image without a pool is a *node.ImageError.
func (s *Set) Claim(ctx context.Context, image string) (*provision.Machine, error) {
	p := s.pools[image]
	if p == nil {
		return nil, &node.ImageError{Image: image, Err: errors.New("this node does not serve it")}
	}
	if err := p.await(ctx); err != nil {
		if ctx.Err() != nil {
			return nil, fmt.Errorf("claim machine: %w", context.Cause(ctx))
		}
		return nil, &node.ImageError{Image: image, Err: err}
	}
	m, err := p.pool.Claim(ctx)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	s.owners[m] = p
	s.mu.Unlock()
	return m, nil
}

// await waits until there is a template, or until making one has failed.
func (p *member) await(ctx context.Context) error {
	for !p.begun.Load() {
		err := p.keeper.Ready()
		var why *provision.KeeperError
		if err == nil {
			p.begun.Store(true)
			return nil
		}
		if !errors.As(err, &why) || !why.At.IsZero() {
			return err
		}
		timer := time.NewTimer(look)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return ctx.Err()
		}
	}
	return nil
}

// Settled implements node.Pool.
func (s *Set) Settled(m *provision.Machine) {
	if p := s.owner(m); p != nil {
		p.pool.Settled(m)
	}
}

// Released implements node.Pool.
func (s *Set) Released(m *provision.Machine) {
	p := s.owner(m)
	if p == nil {
		return
	}
	s.mu.Lock()
	delete(s.owners, m)
	s.mu.Unlock()
	p.pool.Released(m)
}

func (s *Set) owner(m *provision.Machine) *member {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.owners[m]
}

// Ready is nil when runs of at least one image can be started, else it says why not.
func (s *Set) Ready() error {
	var errs []error
	for _, image := range s.images {
		p := s.pools[image]
		err := p.keeper.Ready()
		if err == nil {
			err = p.pool.Ready()
		}
		if err == nil {
			return nil
		}
		errs = append(errs, err)
	}
	if len(errs) == 1 {
		return errs[0]
	}
	return errors.Join(errs...)
}

// Limit says how many runs all images together may have at once (0: as many as the pools allow) and who is told how many the
// node may take, now and whenever Take changes that.
func (s *Set) Limit(most int, take func(runs int)) {
	s.mu.Lock()
	s.most, s.take = most, take
	s.mu.Unlock()
	s.tell()
}

// Able names the images whose pools allow runs now, in the order in which they were added: there is a template to make machines
// of, and the operator does not hold the pool back.
func (s *Set) Able() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	able := make([]string, 0, len(s.images))
	for _, image := range s.images {
		if s.takes[image] > 0 {
			able = append(able, image)
		}
	}
	return able
}

// Take notes how many runs at once the pool of an image allows. With 0, the node takes none of that image.
func (s *Set) Take(image string, runs int) {
	s.mu.Lock()
	s.takes[image] = runs
	s.mu.Unlock()
	s.tell()
}

// tell is called in whatever order changes come: each time it tells what holds then.
func (s *Set) tell() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.take == nil {
		return
	}
	runs := 0
	for _, n := range s.takes {
		runs += n
	}
	if s.most > 0 {
		runs = min(runs, s.most)
	}
	s.take(runs)
}
