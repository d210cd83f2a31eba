package provision

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/ephemeral-run/ephemeral/images"
	"github.com/ephemeral-run/ephemeral/vmm"
)

// How a Keeper goes about its work.
const (
	keeperLook    = 5 * time.Second // between two looks at the image
	keeperBase    = time.Second     // pause after a failed template, doubled with each one that follows
	keeperMost    = time.Minute
	keeperRenewed = "another image is there"
)

// Keeper keeps a good template of whatever image is in a directory: it makes the first one, makes another when the image is
// another one or the driver refuses the template, and tries again, ever more seldom, when that fails. Machines are made of
// the template that is good at the time. Its methods are safe for concurrent use.
type Keeper struct {
	parts    *Provisioner
	open     func() (*images.Held, error)
	shape    vmm.Shape
	progress func(string)
	changed  func(vmm.Template)
	told     Observer      // of what becomes of its machines; nil: the provisioner's
	spoilt   chan struct{} // holds one: the template was refused

	// The images of the template in use and of the one before, which the last machines of that may still be made of; Run's own.
	held, before *images.Held

	mu       sync.Mutex
	template *vmm.Template // nil: there is none
	err      error         // why there is none, or why a newer one cannot be made
	retry    time.Time
}

// Keeper is a keeper of templates; nothing is made before Run. open finds the image, which is held as long as its template is
// made and used, progress (may be nil) is told what
// happens while a template is made, changed what became of it: each time there is another template to make machines of.
func (p *Provisioner) Keeper(open func() (*images.Held, error), shape vmm.Shape, progress func(string), changed func(vmm.Template)) *Keeper {
	if progress == nil {
		progress = func(string) {}
	}
	return &Keeper{
		parts: p, open: open, shape: shape, progress: progress, changed: changed, spoilt: make(chan struct{}, 1),
		err: errNoTemplateYet,
	}
}

var errNoTemplateYet = errors.New("the template of machines is being made")

// KeeperError says why there is no template, and when the keeper tries again.
type KeeperError struct {
	Err error
	At  time.Time // zero: it is trying now
}

func (e *KeeperError) Error() string {
	if e.At.IsZero() {
		return e.Err.Error()
	}
	return fmt.Sprintf("the template of machines cannot be made, next try at %s: %v", e.At.UTC().Format(time.RFC3339), e.Err)
}

// Unwrap gives the reason.
func (e *KeeperError) Unwrap() error { return e.Err }

// RetryAfter is how long it takes until the keeper tries again.
func (e *KeeperError) RetryAfter() time.Duration { return max(0, time.Until(e.At)) }

// Observe makes the keeper tell o, and not the provisioner's observer, what becomes of its machines. It is called before the
// first Create.
func (k *Keeper) Observe(o Observer) { k.told = o }

// Admit is Provisioner.Admit for machines of the keeper's shape.
func (k *Keeper) Admit() error { return k.parts.admit(k.shape.MemoryMiB) }

// Shape is the size of the machines.
func (k *Keeper) Shape() vmm.Shape { return k.shape }

// Ready is nil when there is a template, else a *KeeperError.
func (k *Keeper) Ready() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.template != nil {
		return nil
	}
	return &KeeperError{k.err, k.retry}
}

// Template is the one in use; false: there is none.
func (k *Keeper) Template() (vmm.Template, bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.template == nil {
		return vmm.Template{}, false
	}
	return *k.template, true
}

// Create makes a machine of the template in use. A template that turns out to be unusable is made anew by Run.
func (k *Keeper) Create(ctx context.Context) (*Machine, error) {
	t, ok := k.Template()
	if !ok {
		return nil, k.Ready()
	}
	told := k.told
	if told == nil {
		told = k.parts.told
	}
	m, err := k.parts.create(ctx, t, told)
	if errors.Is(err, vmm.ErrTemplate) {
		k.spoil(t)
	}
	return m, err
}

func (k *Keeper) spoil(t vmm.Template) {
	k.mu.Lock()
	if k.template != nil && k.template.MadeAt.Equal(t.MadeAt) {
		k.template, k.err, k.retry = nil, errNoTemplateYet, time.Time{}
	}
	k.mu.Unlock()
	select {
	case k.spoilt <- struct{}{}:
	default:
	}
}

// Run keeps the template until ctx ends. It is called once.
func (k *Keeper) Run(ctx context.Context) {
	defer func() {
		release(k.held)
		release(k.before)
	}()
	pause := keeperBase
	for ctx.Err() == nil {
		wait := keeperLook
		if err := k.renew(ctx); err != nil && ctx.Err() == nil {
			wait, pause = pause, min(2*pause, keeperMost)
			k.failed(err, wait)
		} else {
			pause = keeperBase
		}
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-k.spoilt:
		case <-ctx.Done():
		}
		timer.Stop()
	}
}

// renew makes a template where there is none, or of another image.
func (k *Keeper) renew(ctx context.Context) error {
	image, err := k.open()
	if err != nil {
		return fmt.Errorf("open the image: %w", err)
	}
	old, ok := k.Template()
	if ok && old.Image.Digest == image.Digest {
		release(image)
		return nil
	}
	if ok {
		k.progress(keeperRenewed + ": " + image.Digest)
	}
	t, err := k.parts.Template(ctx, image.Image, k.shape, k.progress)
	if err != nil {
		release(image)
		return err
	}
	release(k.before)
	k.held, k.before = image, k.held
	k.mu.Lock()
	k.template, k.err, k.retry = &t, nil, time.Time{}
	k.mu.Unlock()
	k.changed(t)
	return nil
}

// release ends the use of an image. It closes a directory that was only read: there is nothing to lose.
func release(h *images.Held) { _ = h.Release() }

// failed keeps why there is no newer template.
func (k *Keeper) failed(err error, wait time.Duration) {
	k.mu.Lock()
	k.err, k.retry = err, time.Now().Add(wait)
	k.mu.Unlock()
	k.progress(fmt.Sprintf("not made, next try in %s: %v", wait, err))
}
