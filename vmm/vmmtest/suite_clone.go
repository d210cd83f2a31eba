package vmmtest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/ephemeral-run/ephemeral/vmm"
)

func (s *suite) testRestoreIsPaused(t *testing.T) {
	m := s.restore(t)
	a := NewAgent(m.Dial)
	s.mustNotAnswer(t, a)
	before, err := m.Stats()
	if err != nil {
		t.Fatal(err)
	}
	time.Sleep(soon)
	after, err := m.Stats()
	if err != nil {
		t.Fatal(err)
	}
	if used := after.CPU - before.CPU; used > soon/4 {
		t.Errorf("a paused machine used %v of CPU in %v", used, soon)
	}
	if err := m.Resume(s.within(t, callTime)); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if err := a.Run(s.within(t, callTime), nil, &out, "cat", inheritance); err != nil {
		t.Fatal(err)
	}
	if out.String() != "template\n" {
		t.Errorf("the clone's memory is not the template's: %q", out.String())
	}
}

func (s *suite) testBadTemplates(t *testing.T) {
	for name, spoil := range map[string]func(t *testing.T, tpl *vmm.Template, spec *vmm.Spec){
		"no directory": func(t *testing.T, tpl *vmm.Template, _ *vmm.Spec) { tpl.Dir = filepath.Join(tpl.Dir, "missing") },
		"no memory":    func(t *testing.T, tpl *vmm.Template, _ *vmm.Spec) { tpl.RAM = filepath.Join(tpl.Dir, "missing") },
		"short memory": func(t *testing.T, tpl *vmm.Template, _ *vmm.Spec) { tpl.RAM = shortFile(t, t.TempDir()) },
		"other shape": func(_ *testing.T, _ *vmm.Template, spec *vmm.Spec) {
			spec.Shape = vmm.Shape{VCPUs: 1, MemoryMiB: 2 * s.Shape.MemoryMiB}
		},
		"other version": func(_ *testing.T, tpl *vmm.Template, _ *vmm.Spec) { tpl.Version += "-other" },
		"other driver":  func(_ *testing.T, tpl *vmm.Template, _ *vmm.Spec) { tpl.Driver += "-other" },
		"short state":   func(t *testing.T, tpl *vmm.Template, _ *vmm.Spec) { tpl.Dir = halved(t, tpl.Dir) },
		"zeroed state":  func(t *testing.T, tpl *vmm.Template, _ *vmm.Spec) { tpl.Dir = zeroed(t, tpl.Dir) },
	} {
		t.Run(name, func(t *testing.T) {
			tpl, spec := s.template, s.spec(t)
			spoil(t, &tpl, &spec)
			m, err := s.Driver.Restore(s.within(t, callTime), tpl, spec)
			if err == nil {
				closeAfter(t, m)
				t.Fatal("it restores")
			}
			if !errors.Is(err, vmm.ErrTemplate) {
				t.Errorf("not vmm.ErrTemplate: %v", err)
			}
		})
	}
}

// spoiled copies a template's directory, without its memory, with each larger file changed.
func spoiled(t *testing.T, dir string, change func([]byte) []byte) string {
	t.Helper()
	to := t.TempDir()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		info, err := e.Info()
		if err != nil {
			t.Fatal(err)
		}
		if info.Size() > 16<<20 {
			continue
		}
		content, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if err != nil {
			t.Fatal(err)
		}
		if len(content) > 16<<10 { // not a small file that describes the others
			content = change(content)
		}
		if err := os.WriteFile(filepath.Join(to, e.Name()), content, 0o444); err != nil {
			t.Fatal(err)
		}
	}
	return to
}

func halved(t *testing.T, dir string) string {
	return spoiled(t, dir, func(b []byte) []byte { return b[:len(b)/2] })
}

func zeroed(t *testing.T, dir string) string {
	return spoiled(t, dir, func(b []byte) []byte { clear(b[len(b)/3:]); return b })
}

// testRestoreCancelled cancels at many moments between before the start and after the end.
func (s *suite) testRestoreCancelled(t *testing.T) {
	begin := time.Now()
	m := s.restore(t)
	whole := time.Since(begin)
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
	const moments = 12
	for i := range moments {
		spec := s.spec(t)
		ctx, cancel := context.WithTimeout(context.Background(), whole*time.Duration(i)/(moments-2))
		m, err := s.Driver.Restore(ctx, s.template, spec)
		switch {
		case err == nil:
			if cerr := m.Close(); cerr != nil {
				t.Error(cerr)
			}
		case ctx.Err() == nil:
			t.Errorf("not cancelled, but: %v", err)
		case !errors.Is(err, context.DeadlineExceeded):
			t.Errorf("cancelled, but: %v", err)
		}
		cancel()
	}
}

func (s *suite) testBootCancelled(t *testing.T) {
	for i := range 6 {
		spec := s.spec(t)
		spec.RAM = filepath.Join(spec.Dir, "ram")
		ctx, cancel := context.WithTimeout(context.Background(), time.Duration(i)*15*time.Millisecond)
		m, err := s.Driver.Boot(ctx, spec)
		switch {
		case err == nil:
			if cerr := m.Close(); cerr != nil {
				t.Error(cerr)
			}
		case !errors.Is(err, context.DeadlineExceeded):
			t.Errorf("cancelled, but: %v", err)
		}
		cancel()
	}
}

// testClonesAreApart writes in one clone and looks in another.
func (s *suite) testClonesAreApart(t *testing.T) {
	_, first := s.running(t)
	_, second := s.running(t)
	const secret = "/tmp/of-first"
	if err := first.Run(s.within(t, callTime), nil, io.Discard, "sh", "-c", "echo changed >"+inheritance+"; head -c 20000000 /dev/zero >"+secret); err != nil {
		t.Fatal(err)
	}
	_, third := s.running(t)
	for name, a := range map[string]*Agent{"an older sibling": second, "a younger sibling": third} {
		var out bytes.Buffer
		if err := a.Run(s.within(t, callTime), nil, &out, "sh", "-c", "cat "+inheritance+"; test ! -e "+secret); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if out.String() != "template\n" {
			t.Errorf("%s reads %q", name, out.String())
		}
	}
}

func (s *suite) testClonesInARow(t *testing.T) {
	var ready, first []time.Duration
	for range s.Clones {
		got, err := s.TimeClone(s.within(t, 4*callTime), t, s.template)
		if err != nil {
			t.Fatal(err)
		}
		ready, first = append(ready, got.Ready), append(first, got.Exec)
	}
	t.Logf("%d clones, medians: first answer after %v, first command after %v", s.Clones, Median(ready), Median(first))
}

func (s *suite) testClonesAtOnce(t *testing.T) {
	machines := make([]vmm.Machine, s.AtOnce)
	agents := make([]*Agent, s.AtOnce)
	var group errgroup.Group
	for i := range machines {
		spec := s.spec(t)
		group.Go(func() error {
			m, err := s.Driver.Restore(s.within(t, 20*callTime), s.template, spec)
			if err != nil {
				return err
			}
			machines[i], agents[i] = m, NewAgent(m.Dial)
			return m.Resume(s.within(t, 20*callTime))
		})
	}
	err := group.Wait()
	for _, m := range machines {
		if m != nil {
			closeAfter(t, m)
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	for round := range 2 {
		for i, a := range agents {
			group.Go(func() error {
				want := fmt.Sprintf("clone %d round %d", i, round)
				var out bytes.Buffer
				if err := a.Run(s.within(t, 20*callTime), nil, &out, "sh", "-c", "echo "+want+" >/run/me; cat /run/me"); err != nil {
					return err
				}
				if strings.TrimSpace(out.String()) != want {
					return fmt.Errorf("clone %d says %q", i, out.String())
				}
				return nil
			})
		}
		if err := group.Wait(); err != nil {
			t.Fatal(err)
		}
	}
	var private int64
	for _, m := range machines {
		got, err := m.Stats()
		if err != nil {
			t.Fatal(err)
		}
		private += got.PrivateBytes
	}
	private /= int64(len(machines))
	t.Logf("%d clones alive, %.2f MB private memory each", len(machines), float64(private)/1e6)
	if s.MostPrivate > 0 && private > s.MostPrivate {
		t.Errorf("%d bytes of private memory, at most %d", private, s.MostPrivate)
	}
}
