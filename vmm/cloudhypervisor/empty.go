package cloudhypervisor

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

// LaunchEmpty launches the process of a clone. It also writes what the process will be told to load: all that can be wrong
// with a template is found out here.
func (d *Driver) LaunchEmpty(ctx context.Context, t vmm.Template, s vmm.Spec) (vmm.Empty, error) {
	s = hypervisor.Clone(t, s)
	if err := hypervisor.Check(s); err != nil {
		return nil, fmt.Errorf("restore machine %s: %w", s.ID, err)
	}
	config, memory, err := d.fit(t, s)
	if err != nil {
		return nil, fmt.Errorf("restore machine %s: %w: %w", s.ID, vmm.ErrTemplate, err)
	}
	dir := filepath.Join(s.Dir, cloneDir)
	if err := writeClone(dir, config, filepath.Join(t.Dir, stateFile), memory); err != nil {
		return nil, fmt.Errorf("restore machine %s: %w", s.ID, err)
	}
	readOnly := append([]string{t.RAM, filepath.Join(t.Dir, stateFile), s.Image.RootFS}, visibleNIC(s)...)
	m, err := d.start(ctx, s, readOnly, nil)
	if err != nil {
		return nil, err
	}
	return vmm.NewEmpty(m, func(ctx context.Context) error {
		if err := m.restore(ctx, dir); err != nil {
			return m.abort(m.Wrap("restore", err))
		}
		return nil
	}), nil
}
