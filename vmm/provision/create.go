package provision

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/ephemeral-run/ephemeral/vmm"
)

// The steps of creating a machine.
const (
	StepLaunch = "launch" // directory, jail and tap are made, the VMM's process is started in the jail; nothing with a spare in hand
	StepLoad   = "load"   // the VMM takes the template's state
	StepResume = "resume" // the guest runs
	StepProbe  = "probe"  // the guest's agent has run a command, which also brings in the memory that any needs
	StepRest   = "rest"   // the machine is paused, or left running
	// StepPrepare is no step to a ready machine. It comes after them, before the rest: the machine becomes an individual.
	StepPrepare = "prepare"
)

// createSteps is how a machine is created.
var createSteps = []struct {
	name string
	do   func(*creation, context.Context) error
}{
	{StepLaunch, (*creation).launch},
	{StepLoad, (*creation).load},
	{StepResume, (*creation).resume},
	{StepProbe, (*creation).probe},
	{StepRest, (*creation).rest},
}

// creation is a machine being created.
type creation struct {
	*parts
	template vmm.Template
	empty    vmm.Empty     // launched, of a driver that does this apart from loading; nil: restored does both
	restored chan struct{} // closed when the driver's Restore has returned machine or err; nil with empty
	machine  vmm.Machine
	err      error
}

// Create makes a machine of a template and returns it when it has proved to work and rests, or is about to; see
// Agent.Prepare. When it fails nothing is left.
// An error that is vmm.ErrTemplate makes the next call of Template build a new one. Where a spare of the template is in hand
// it starts at the load, and afterwards another one is launched.
func (p *Provisioner) Create(ctx context.Context, t vmm.Template) (*Machine, error) {
	return p.create(ctx, t, p.told)
}

func (p *Provisioner) create(ctx context.Context, t vmm.Template, told Observer) (*Machine, error) {
	if err := p.begin(); err != nil {
		return nil, fmt.Errorf("create machine: %w", err)
	}
	defer p.busy.Done()
	defer p.restock(t)
	last := time.Now()
	c := p.takeSpare(t)
	if c == nil {
		c = &creation{parts: p.newParts(), template: t}
	}
	steps := make([]Step, 0, len(createSteps))
	for _, step := range createSteps {
		if step.name == StepRest && p.agent.Prepare != nil {
			break // it rests after that
		}
		if err := step.do(c, ctx); err != nil {
			if errors.Is(err, vmm.ErrTemplate) {
				p.distrust(t.Key)
			}
			if cause := context.Cause(ctx); cause != nil && !errors.Is(err, cause) { // what broke because of it may say something else
				err = fmt.Errorf("%w: %w", cause, err)
			}
			err = &CreateError{ID: c.id, Step: step.name, Err: advise(err)}
			told.CreateFailed(step.name, err)
			return nil, errors.Join(err, p.left(c.cleanup.run(closeLimit)))
		}
		now := time.Now()
		steps = append(steps, Step{step.name, now.Sub(last)})
		last = now
	}
	m := &Machine{Machine: c.machine, image: t.Image.Digest, cell: c.cell, tap: c.tap, rest: p.rest, steps: steps, madeAt: last, probe: p.agent.Probe, turns: p.turns}
	if p.agent.Prepare != nil {
		m.preparation = p.prepare(c.machine, told)
		c.cleanup.push("preparation", m.preparation.stop)
	}
	p.own(m, &c.cleanup, told)
	told.Created(steps)
	return m, nil
}

// CreateError says which step of a creation failed.
type CreateError struct {
	ID   string // of the machine
	Step string
	Err  error
}

func (e *CreateError) Error() string {
	return fmt.Sprintf("create machine %s: %s: %v", e.ID, e.Step, e.Err)
}

// Unwrap gives the cause.
func (e *CreateError) Unwrap() error { return e.Err }

// launch makes the parts and launches the VMM's process, unless both are there already.
func (c *creation) launch(ctx context.Context) error {
	if c.empty != nil {
		return nil
	}
	if err := c.make(c.template.Shape.MemoryMiB); err != nil {
		return err
	}
	spec := c.spec()
	spec.Image, spec.Shape = c.template.Image, c.template.Shape
	launcher, ok := c.p.driver.(vmm.EmptyLauncher)
	if !ok {
		return c.restore(ctx, spec)
	}
	var err error
	if c.empty, err = launcher.LaunchEmpty(ctx, c.template, spec); err != nil {
		return err
	}
	c.cleanup.push("machine", func() error {
		if c.machine != nil {
			return c.machine.Close()
		}
		return c.empty.Close()
	})
	return nil
}

// restore starts the driver's Restore, and returns when the VMM's process has been launched.
func (c *creation) restore(ctx context.Context, spec vmm.Spec) error {
	launched := make(chan struct{})
	c.restored = make(chan struct{})
	spec.Launcher = signalling{c.cell, launched}
	go func() {
		defer close(c.restored)
		c.machine, c.err = c.p.driver.Restore(ctx, c.template, spec)
	}()
	c.cleanup.push("machine", func() error {
		<-c.restored
		if c.err != nil {
			return nil // the driver has cleaned up after itself
		}
		return c.machine.Close()
	})
	select {
	case <-launched:
		return nil
	case <-c.restored:
		select {
		case <-launched: // at the same time: what failed is not the launch
			return nil
		default:
			return c.err
		}
	}
}

// load has the process take the template's state.
func (c *creation) load(ctx context.Context) error {
	if c.empty == nil {
		<-c.restored // Restore ends with the context it was given
		return c.err
	}
	m, err := c.empty.Load(ctx)
	if err == nil {
		c.machine = m
	}
	return err
}

func (c *creation) resume(ctx context.Context) error { return c.machine.Resume(ctx) }

func (c *creation) probe(ctx context.Context) error { return c.p.agent.Probe(ctx, c.machine) }

func (c *creation) rest(ctx context.Context) error {
	if c.p.rest == RestRunning {
		return nil
	}
	return c.machine.Pause(ctx)
}

// signalling tells when a program was launched.
type signalling struct {
	vmm.Launcher
	launched chan struct{}
}

func (s signalling) Launch(ctx context.Context, c vmm.Command) (vmm.Process, error) {
	p, err := s.Launcher.Launch(ctx, c)
	if err == nil {
		close(s.launched)
	}
	return p, err
}

// parts is what a machine needs of the host: an id, a directory, a jail and a tap. Cleanup removes them.
type parts struct {
	p       *Provisioner
	id      string
	dir     *directory
	cell    cell
	tap     tap
	cleanup cleanup
}

func (p *Provisioner) newParts() *parts {
	c := &parts{p: p, id: p.newID()}
	c.cleanup.push("id", func() error {
		p.forgetID(c.id)
		return nil
	})
	return c
}

// make makes the parts. What it made is in cleanup, also when it fails.
func (c *parts) make(memoryMiB int) (err error) {
	if c.dir, err = makeDirectory(filepath.Join(c.p.config.DataDir, "machines", c.id), 0o700); err != nil {
		return fmt.Errorf("make directory: %w", err)
	}
	c.cleanup.push("directory", c.dir.remove)
	if c.cell, err = c.p.host.cell(c.id, memoryMiB); err != nil {
		return fmt.Errorf("make jail: %w", err)
	}
	c.cleanup.push("jail", c.cell.Close)
	if err := os.Chown(c.dir.path, c.cell.UID(), c.cell.UID()); err != nil {
		return fmt.Errorf("give directory to user %d: %w", c.cell.UID(), err)
	}
	if c.tap, err = c.p.host.tap(c.id, c.cell.UID()); err != nil {
		return fmt.Errorf("make tap: %w", err)
	}
	c.cleanup.push("tap", c.tap.Close)
	return nil
}

func (c *parts) spec() vmm.Spec {
	return vmm.Spec{ID: c.id, Dir: c.dir.path, NIC: c.tap.nic(), Launcher: c.cell}
}
