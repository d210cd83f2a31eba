package provision

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ephemeral-run/ephemeral/vmm"
)

// prepareLimit bounds a preparation and the rest after it. On a busy host it is longer; see vmm.Patience.
const prepareLimit = 30 * time.Second

// preparation is what goes on beside a machine that is ready: it becomes an individual, so that its user finds that done,
// and comes to rest.
type preparation struct {
	machine vmm.Machine
	end     context.CancelFunc
	ending  atomic.Bool   // the machine is being closed, and fails for that
	done    chan struct{} // closed when nothing goes on any more

	mu      sync.Mutex
	claimed bool      // so that it does not rest
	resting bool      // paused
	clock   vmm.Clock // once it is prepared
	err     error

	setting sync.WaitGroup // of the clock
	stopped bool           // it is not set any more
	right   chan error     // gets one value when a machine was woken: whether its clock is right
}

// prepare starts the preparation of a machine, which is ready and may be claimed meanwhile. A machine that fails it ends.
func (p *Provisioner) prepare(m vmm.Machine, told Observer) *preparation {
	limit := time.Duration(vmm.Patience() * float64(prepareLimit))
	ctx, end := context.WithTimeout(context.Background(), limit)
	r := &preparation{machine: m, end: end, done: make(chan struct{}), right: make(chan error, 1)}
	go func() {
		defer close(r.done)
		defer end()
		began := time.Now()
		clock, err := p.agent.Prepare(ctx, m)
		if err != nil {
			r.fail(StepPrepare, err, told)
			return
		}
		r.mu.Lock()
		r.clock = clock
		r.mu.Unlock()
		steps := []Step{{StepPrepare, time.Since(began)}}
		if p.rest == RestPaused {
			began = time.Now()
			if err := r.pause(ctx, m); err != nil {
				r.fail(StepRest, err, told)
				return
			}
			steps = append(steps, Step{StepRest, time.Since(began)})
		}
		told.Rested(steps)
	}()
	return r
}

// pause pauses the machine, unless it is claimed already.
func (r *preparation) pause(ctx context.Context, m vmm.Machine) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.claimed {
		return nil
	}
	err := m.Pause(ctx)
	r.resting = err == nil
	return err
}

// fail ends the machine, which tells whoever keeps it that it is of no use. Why is told, unless the machine was closed anyway.
func (r *preparation) fail(step string, err error, told Observer) {
	failed := &CreateError{ID: r.machine.ID(), Step: step, Err: err}
	if !r.ending.Load() {
		told.CreateFailed(step, failed)
	}
	r.mu.Lock()
	r.err = failed
	r.mu.Unlock()
	_ = r.machine.Close() // Machine.Close closes it again, and tells
}

// claim ends the rest: it waits for what goes on, since a guest does one thing at a time, and tells whether the machine is
// paused.
func (r *preparation) claim(ctx context.Context) (paused bool, err error) {
	r.mu.Lock()
	r.claimed = true
	r.mu.Unlock()
	select {
	case <-r.done:
	case <-ctx.Done():
		return false, context.Cause(ctx)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.resting, r.err
}

// isRight says that the clock is right without being set.
func (r *preparation) isRight() { r.right <- nil }

// set begins to set the clock.
func (r *preparation) set(ctx context.Context) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.stopped {
		r.right <- vmm.ErrClosed
		return
	}
	r.setting.Go(func() { r.right <- r.clock.Set(ctx) })
}

// confirmed waits for the clock to be right.
func (r *preparation) confirmed(ctx context.Context) error {
	select {
	case err := <-r.right:
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// stop ends the preparation and whatever came after it, and waits for the end. The machine goes first: a connection that is
// closed while it lives, and is not answered any more, would be remembered for as long as an answer may take.
func (r *preparation) stop() (err error) {
	r.ending.Store(true)
	_ = r.machine.Close() // it is closed again, and then tells
	r.end()
	<-r.done
	r.mu.Lock()
	r.stopped = true
	r.mu.Unlock()
	if r.clock != nil {
		err = r.clock.Close()
	}
	r.setting.Wait()
	return err
}
