package provision

import (
	"context"
	"errors"
	"sync"

	"github.com/ephemeral-run/ephemeral/images"
	"github.com/ephemeral-run/ephemeral/vmm"
)

// Source makes machines of one image and shape, from whatever template of them is good at the time. Its methods are safe
// for concurrent use.
type Source struct {
	parts    *Provisioner
	image    images.Image
	shape    vmm.Shape
	progress func(string)

	mu       sync.Mutex
	template *vmm.Template // nil: to be made, or made anew
}

// Source is a source of machines; progress (may be nil) is told what happens while a template is made.
func (p *Provisioner) Source(image images.Image, shape vmm.Shape, progress func(string)) *Source {
	return &Source{parts: p, image: image, shape: shape, progress: progress}
}

// Template returns the template in use, and makes it if there is none.
func (s *Source) Template(ctx context.Context) (vmm.Template, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.template == nil {
		t, err := s.parts.Template(ctx, s.image, s.shape, s.progress)
		if err != nil {
			return vmm.Template{}, err
		}
		s.template = &t
	}
	return *s.template, nil
}

// Create makes a machine. When the template turns out to be unusable it fails, and the next call makes a new template.
func (s *Source) Create(ctx context.Context) (*Machine, error) {
	t, err := s.Template(ctx)
	if err != nil {
		return nil, err
	}
	m, err := s.parts.Create(ctx, t)
	if errors.Is(err, vmm.ErrTemplate) {
		s.mu.Lock()
		if s.template != nil && s.template.MadeAt.Equal(t.MadeAt) {
			s.template = nil
		}
		s.mu.Unlock()
	}
	return m, err
}
