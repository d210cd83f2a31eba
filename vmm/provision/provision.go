package provision

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"

	"github.com/ephemeral-run/ephemeral/vmm"
)

// ErrClosed: the provisioner was closed.
var ErrClosed = errors.New("provisioner closed")

// Agent is what provisioning asks of the guest's agent. All must end soon after their context does.
type Agent struct {
	Probe func(context.Context, vmm.Machine) error // one real command, answered: the machine works
	Warm  func(context.Context, vmm.Machine) error // runs what a template is to have in memory already
	// Prepare makes a clone differ from its siblings. It goes on beside a machine that is ready, and one that is claimed
	// meanwhile is its user's when it is done. Its clock is set again when it wakes. nil: whoever claims a machine prepares it.
	Prepare func(context.Context, vmm.Machine) (vmm.Clock, error)
}

// Provisioner makes machines on one host with one driver. Its methods are safe for concurrent use.
type Provisioner struct {
	config Config // with Node and Jail.Node set
	driver vmm.Driver
	agent  Agent
	host   host
	rest   Rest // paused or running
	told   Observer
	spares *spares
	turns  turns // of machines that wake

	mu      sync.Mutex
	ids     map[string]struct{}   // of every machine that has parts, also half-made ones
	open    map[*Machine]struct{} // created and not closed
	suspect map[string]bool       // keys of templates that a driver refused
	held    map[string]*os.File   // templates in use, by directory, with a shared lock
	busy    sync.WaitGroup        // creations and template builds under way
	closed  bool

	untidy   chan struct{} // holds one: something could not be removed; see Tidy
	scrapErr error         // what went wrong with the removal of spares; under spares.mu
}

// New opens the host's parts: data directory, network namespace, jail. It fails when another live process uses this node
// (network.ErrInUse, jail.ErrInUse). Call Reconcile before the first Create. It needs root.
func New(ctx context.Context, c Config, driver vmm.Driver, agent Agent) (*Provisioner, error) {
	p, err := prepare(c, driver, agent)
	if err != nil {
		return nil, fmt.Errorf("open provisioner: %w", err)
	}
	h, err := openLinux(ctx, p.config.Jail)
	if err != nil {
		return nil, fmt.Errorf("open provisioner: %w", err)
	}
	p.host = h
	return p, nil
}

// prepare does all of New but the host.
func prepare(c Config, driver vmm.Driver, agent Agent) (*Provisioner, error) {
	if err := c.Validate(); err != nil {
		return nil, err
	}
	for _, dir := range []string{c.DataDir, filepath.Join(c.DataDir, "machines"), filepath.Join(c.DataDir, "templates")} {
		if err := openDirectory(dir); err != nil {
			return nil, err
		}
	}
	if err := searchable(filepath.Join(c.DataDir, "machines")); err != nil {
		return nil, err
	}
	node, err := c.NodeID()
	if err != nil {
		return nil, err
	}
	c.Node, c.Jail.Node = node, node
	rest := c.Rest
	if rest == RestAuto {
		rest = RestRunning
		if driver.Isolation() == vmm.Emulated {
			rest = RestPaused
		}
	}
	return &Provisioner{
		config: c, driver: driver, agent: agent, rest: rest, told: deaf{}, spares: newSpares(), turns: newTurns(),
		ids: map[string]struct{}{}, open: map[*Machine]struct{}{}, suspect: map[string]bool{}, held: map[string]*os.File{},
		untidy: make(chan struct{}, 1),
	}, nil
}

// Node is the node's id.
func (p *Provisioner) Node() string { return p.config.Node }

// Rest is what created machines do until they are claimed: paused or running.
func (p *Provisioner) Rest() Rest { return p.rest }

// Close waits for what is being made, closes every machine that is still open, and gives the host's parts back.
func (p *Provisioner) Close() error {
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	p.endSpares()
	p.busy.Wait()
	p.mu.Lock()
	machines := make([]*Machine, 0, len(p.open))
	for m := range p.open {
		machines = append(machines, m)
	}
	p.mu.Unlock()
	errs := make([]error, len(machines)+3)
	errs[len(machines)+2] = p.closeSpares()
	var closing sync.WaitGroup
	for i, m := range machines {
		closing.Go(func() { errs[i] = m.Close() })
	}
	closing.Wait()
	errs[len(machines)] = p.host.close()
	errs[len(machines)+1] = p.letGo()
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("close provisioner: %w", err)
	}
	return nil
}

// begin says that something is being made; p.busy.Done ends it.
func (p *Provisioner) begin() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return ErrClosed
	}
	p.busy.Add(1)
	return nil
}

// newID gives a machine its id: 12 hexadecimal digits that no other machine here has.
func (p *Provisioner) newID() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	for {
		id := randomHex(6)
		if _, used := p.ids[id]; !used {
			p.ids[id] = struct{}{}
			return id
		}
	}
}

func (p *Provisioner) forgetID(id string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.ids, id)
}

func (p *Provisioner) owns(id string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	_, ok := p.ids[id]
	return ok
}
