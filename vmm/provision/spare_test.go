package provision

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/ephemeral-run/ephemeral/vmm"
)

// twoPart plays a driver that launches apart from loading.
type twoPart struct{ *stage }

func (s twoPart) LaunchEmpty(ctx context.Context, t vmm.Template, spec vmm.Spec) (vmm.Empty, error) {
	m, err := s.machine(ctx, "launch empty", spec)
	if err != nil {
		return nil, err
	}
	return vmm.NewEmpty(m, func(ctx context.Context) error {
		if err := s.do(ctx, "load"); err != nil {
			return errors.Join(err, m.Close())
		}
		return nil
	}), nil
}

// stocked is a provisioner of such a driver, with a template and n spares in hand.
func stocked(t *testing.T, s *stage, n int) (*Provisioner, vmm.Template) {
	t.Helper()
	dir := dataDir(t)
	c := config(dir)
	c.Spares = n
	p, err := prepare(c, twoPart{s}, s.agent())
	if err != nil {
		t.Fatal(err)
	}
	p.host = s
	tmpl, err := p.Template(t.Context(), image(t, dir), c.Shape(), nil)
	if err != nil {
		t.Fatal(err)
	}
	m, err := p.Create(t.Context(), tmpl)
	if err != nil {
		t.Fatal(err)
	}
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
	await(t, p, tmpl, n)
	s.mu.Lock()
	s.log = nil
	s.mu.Unlock()
	return p, tmpl
}

func await(t *testing.T, p *Provisioner, tmpl vmm.Template, n int) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); p.Spares(tmpl) != n; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%d spares, want %d", p.Spares(tmpl), n)
		}
	}
}

func TestCreationStartsAtTheLoadWithASpare(t *testing.T) {
	s := newStage()
	p, tmpl := stocked(t, s, 2)
	m, err := p.Create(t.Context(), tmpl)
	if err != nil {
		t.Fatal(err)
	}
	if got := s.events()[:3]; !slices.Equal(got, []string{"load", "resume", "probe"}) {
		t.Errorf("the creation began with %q", got)
	}
	await(t, p, tmpl, 2)
	if n := s.count("launch empty"); n != 1 {
		t.Errorf("%d spares were launched for the one that was taken", n)
	}
	if err := errors.Join(m.Close(), p.Close()); err != nil {
		t.Fatal(err)
	}
	s.empty(t, p)
}

// A spare that has died is no obstacle, and neither is one of a template that was made anew.
func TestUselessSparesAreReplaced(t *testing.T) {
	for name, spoil := range map[string]func(*Provisioner, *vmm.Template){
		"dead": func(p *Provisioner, tmpl *vmm.Template) { _ = p.spares.byKey[tmpl.Key][0].empty.Close() },
		"old":  func(_ *Provisioner, tmpl *vmm.Template) { tmpl.MadeAt = tmpl.MadeAt.Add(time.Second) },
	} {
		t.Run(name, func(t *testing.T) {
			s := newStage()
			p, tmpl := stocked(t, s, 1)
			spoil(p, &tmpl)
			m, err := p.Create(t.Context(), tmpl)
			if err != nil {
				t.Fatal(err)
			}
			if n := s.count("launch empty"); n < 1 {
				t.Error("the machine was made from the spare")
			}
			if err := errors.Join(m.Close(), p.Close()); err != nil {
				t.Fatal(err)
			}
			s.empty(t, p)
		})
	}
}

func TestFailuresWithSparesLeaveNothing(t *testing.T) {
	broken := errors.New("broken")
	for _, what := range []string{"load", "resume", "probe", "pause", "launch empty"} {
		t.Run(what, func(t *testing.T) {
			s := newStage()
			p, tmpl := stocked(t, s, 1)
			s.mu.Lock()
			s.fail[what] = broken
			s.mu.Unlock()
			m, err := p.Create(t.Context(), tmpl)
			if what == "launch empty" { // of the next spare only
				if err != nil {
					t.Fatal(err)
				}
				if err := m.Close(); err != nil {
					t.Error(err)
				}
			} else if !errors.Is(err, broken) {
				t.Fatalf("got %v, %v", m, err)
			}
			if err := p.Close(); err != nil {
				t.Fatal(err)
			}
			s.empty(t, p)
		})
	}
}

// A template that is refused takes its spares with it, before its files go.
func TestSparesGoWithTheirTemplate(t *testing.T) {
	s := newStage()
	p, tmpl := stocked(t, s, 3)
	s.mu.Lock()
	s.fail["load"] = vmm.ErrTemplate
	s.mu.Unlock()
	if _, err := p.Create(t.Context(), tmpl); !errors.Is(err, vmm.ErrTemplate) {
		t.Fatalf("got %v", err)
	}
	s.mu.Lock()
	delete(s.fail, "load")
	s.mu.Unlock()
	again, err := p.Template(t.Context(), tmpl.Image, tmpl.Shape, nil)
	if err != nil {
		t.Fatal(err)
	}
	if n := p.Spares(tmpl); n != 0 || !again.MadeAt.After(tmpl.MadeAt) {
		t.Errorf("%d spares of the old template", n)
	}
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	s.empty(t, p)
}
