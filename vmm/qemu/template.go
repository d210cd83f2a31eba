package qemu

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/ephemeral-run/ephemeral/vmm"
	"github.com/ephemeral-run/ephemeral/vmm/hypervisor"
)

// Files of a template beside its memory.
const (
	stateFile    = "state"     // the machine without its memory, in QEMU's migration format
	manifestFile = "qemu.json" // what a clone must have in common
	maxState     = 64 << 20    // bytes; a state has some hundred KiB
)

// manifest is what a clone must have in common with the template's machine.
type manifest struct {
	hypervisor.Made
	OptionROM string `json:"option_rom"`
	State     int64  `json:"state_bytes"`
}

// Boot starts a machine from its image.
func (d *Driver) Boot(ctx context.Context, s vmm.Spec) (vmm.Machine, error) {
	if err := hypervisor.Check(s); err != nil {
		return nil, fmt.Errorf("boot machine %s: %w", s.ID, err)
	}
	m, err := d.start(ctx, s, func(c *command) ([]string, []string, error) {
		d.bootArgs(c, s)
		readOnly := []string{s.Image.Kernel, s.Image.Initramfs, s.Image.RootFS}
		if s.RAM == "" {
			return readOnly, nil, nil
		}
		return readOnly, []string{filepath.Dir(s.RAM)}, hypervisor.PrepareRAM(s)
	})
	if err != nil {
		return nil, err
	}
	m.setRunning(true)
	return m, nil
}

// Snapshot makes a template of the machine: its state goes to dir, its memory is in spec.RAM already. The machine can
// only be closed afterwards.
func (m *machine) Snapshot(ctx context.Context, dir string) error {
	return m.operate(ctx, "snapshot", func(ctx context.Context) error {
		switch {
		case m.Spec.RAM == "":
			return fmt.Errorf("%w: its memory is not in a file", vmm.ErrState)
		case m.isRunning():
			return fmt.Errorf("%w: it is running", vmm.ErrState)
		case m.line.connected():
			return fmt.Errorf("%w: it is connected", vmm.ErrState)
		case m.snapshotted:
			return fmt.Errorf("%w: it was snapshotted", vmm.ErrState)
		}
		rom, err := optionROM(m.Spec.Image.Kernel)
		if err != nil {
			return err
		}
		m.snapshotted = true // from here on the file must not change
		size, err := m.save(ctx, filepath.Join(dir, stateFile))
		if err != nil {
			return err
		}
		content, err := json.Marshal(manifest{Made: m.Made(m.driver), OptionROM: rom, State: size})
		if err != nil {
			return err
		}
		return os.WriteFile(filepath.Join(dir, manifestFile), append(content, '\n'), 0o644)
	})
}

// save writes the state to path and returns its size. QEMU writes into a pipe, not into the file: it needs no access to
// the template's directory, and what it writes is bounded.
func (m *machine) save(ctx context.Context, path string) (size int64, err error) {
	file, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return 0, err
	}
	defer func() {
		err = errors.Join(err, file.Close())
		if err != nil {
			_ = os.Remove(path)
		}
	}()
	from, to, err := os.Pipe()
	if err != nil {
		return 0, err
	}
	defer func() { _ = from.Close() }()
	err = m.migrate(ctx, to)
	_ = to.Close()
	if err != nil {
		return 0, err
	}
	stop := context.AfterFunc(ctx, func() { _ = from.SetReadDeadline(time.Unix(1, 0)) })
	size, err = io.Copy(file, io.LimitReader(from, maxState+1))
	if !stop() {
		return 0, context.Cause(ctx)
	}
	if err == nil && size > maxState {
		err = fmt.Errorf("the state has more than %d bytes", maxState)
	}
	if err != nil {
		return 0, err
	}
	if err := m.awaitMigration(ctx); err != nil {
		return 0, err
	}
	return size, file.Sync()
}

// migrate starts to write the state into a pipe.
func (m *machine) migrate(ctx context.Context, to *os.File) error {
	const name = "state"
	if err := m.monitor.execute(ctx, "getfd", map[string]any{"fdname": name}, to); err != nil {
		return err
	}
	if err := m.setMigration(ctx); err != nil {
		return err
	}
	return m.monitor.execute(ctx, "migrate", map[string]any{"uri": "fd:" + name})
}

// setMigration prepares either end of a migration: shared memory stays where it is, the end is told by an event, and a
// restored machine does not announce itself on the network.
func (m *machine) setMigration(ctx context.Context) error {
	capability := func(name string) map[string]any { return map[string]any{"capability": name, "state": true} }
	err := m.monitor.execute(ctx, "migrate-set-capabilities", map[string]any{
		"capabilities": []any{capability("x-ignore-shared"), capability("events")},
	})
	if err != nil {
		return err
	}
	return m.monitor.execute(ctx, "migrate-set-parameters", map[string]any{"announce-rounds": 0})
}

func (m *machine) awaitMigration(ctx context.Context) error {
	select {
	case err := <-m.loaded:
		return err
	case <-m.monitor.done:
		return m.monitor.lost()
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// fit reads a template's manifest and compares it with what a clone here would be.
func (d *Driver) fit(t vmm.Template, s vmm.Spec) (manifest, error) {
	var got manifest
	if err := hypervisor.ReadManifest(filepath.Join(t.Dir, manifestFile), &got); err != nil {
		return got, err
	}
	if err := hypervisor.Fit(d, t, got.Made, s); err != nil {
		return got, err
	}
	state, err := os.Stat(filepath.Join(t.Dir, stateFile))
	if err == nil && state.Size() != got.State {
		err = fmt.Errorf("its state has %d bytes, not %d", state.Size(), got.State)
	}
	return got, err
}

// load feeds the state to QEMU and waits until it has taken it.
func (m *machine) load(ctx context.Context, path string, size int64) error {
	state, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("%w: %w", vmm.ErrTemplate, err)
	}
	defer func() { _ = state.Close() }()
	from, to, err := os.Pipe()
	if err != nil {
		return err
	}
	const name = "state"
	err = m.monitor.execute(ctx, "getfd", map[string]any{"fdname": name}, from)
	_ = from.Close()
	if err == nil {
		err = m.setMigration(ctx)
	}
	if err == nil {
		err = m.monitor.execute(ctx, "migrate-incoming", map[string]any{"uri": "fd:" + name})
	}
	if err != nil {
		_ = to.Close()
		return err
	}
	stop := context.AfterFunc(ctx, func() { _ = to.SetWriteDeadline(time.Unix(1, 0)) })
	_, err = io.Copy(to, io.LimitReader(state, size))
	_ = to.Close()
	if !stop() {
		return context.Cause(ctx)
	}
	if werr := m.awaitMigration(ctx); werr != nil {
		err = werr
	}
	return err
}

// refused tells whether QEMU found the state unfit. It says so and ends.
func (m *machine) refused() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.loadFailed || strings.Contains(m.Words(), "load of migration failed")
}
