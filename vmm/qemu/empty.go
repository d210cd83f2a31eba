package qemu

import (
	"context"
	"fmt"
	"path/filepath"

	"github.com/ephemeral-run/ephemeral/vmm"
	"github.com/ephemeral-run/ephemeral/vmm/hypervisor"
)

var _ vmm.EmptyLauncher = (*Driver)(nil)

// Restore starts a machine from a template and returns it paused.
func (d *Driver) Restore(ctx context.Context, t vmm.Template, s vmm.Spec) (vmm.Machine, error) {
	e, err := d.LaunchEmpty(ctx, t, s)
	if err != nil {
		return nil, err
	}
	return e.Load(ctx)
}

// LaunchEmpty launches the QEMU of a clone. It has the template's memory mapped already, and waits for the state.
func (d *Driver) LaunchEmpty(ctx context.Context, t vmm.Template, s vmm.Spec) (vmm.Empty, error) {
	s = hypervisor.Clone(t, s)
	if err := hypervisor.Check(s); err != nil {
		return nil, fmt.Errorf("restore machine %s: %w", s.ID, err)
	}
	what, err := d.fit(t, s)
	if err != nil {
		return nil, fmt.Errorf("restore machine %s: %w: %w", s.ID, vmm.ErrTemplate, err)
	}
	memory, err := d.memory(ctx, t)
	if err != nil {
		return nil, fmt.Errorf("restore machine %s: %w", s.ID, err)
	}
	m, err := d.start(ctx, s, func(c *command) ([]string, []string, error) {
		d.restoreArgs(c, s, memory.path(c), what.OptionROM)
		return append(memory.visible(), t.Image.RootFS), nil, nil
	})
	if err != nil {
		memory.release()
		return nil, err
	}
	go func() {
		<-m.Done()
		memory.release()
	}()
	return vmm.NewEmpty(m, func(ctx context.Context) error {
		err := m.load(ctx, filepath.Join(t.Dir, stateFile), what.State)
		if err == nil {
			return nil
		}
		err = m.abort(m.Wrap("restore", err))
		if ctx.Err() == nil && m.refused() {
			err = fmt.Errorf("%w: %w", vmm.ErrTemplate, err)
		}
		return err
	}), nil
}
