package provision

import (
	"context"
	"errors"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/ephemeral-run/ephemeral/vmm"
)

func TestCreateAndCloseInOrder(t *testing.T) {
	for _, tc := range []struct {
		isolation vmm.Isolation
		rest      Rest
		paused    bool
	}{
		{vmm.Emulated, RestAuto, true},
		{vmm.KVM, RestAuto, false},
		{vmm.Emulated, RestRunning, false},
		{vmm.KVM, RestPaused, true},
	} {
		t.Run(string(tc.isolation)+" "+string(tc.rest), func(t *testing.T) {
			s := newStage()
			s.isolation = tc.isolation
			p, tmpl := made(t, s)
			c := p.config
			c.Rest = tc.rest
			p = open(t, s, c)
			start := time.Now()
			m, err := p.Create(t.Context(), tmpl)
			if err != nil {
				t.Fatal(err)
			}
			whole := time.Since(start)
			var names []string
			var sum time.Duration
			for _, step := range m.Steps() {
				names = append(names, step.Name)
				sum += step.Duration
			}
			if diff := cmp.Diff([]string{StepLaunch, StepLoad, StepResume, StepProbe, StepRest}, names); diff != "" {
				t.Errorf("steps (-want +got):\n%s", diff)
			}
			if sum > whole || whole-sum > 50*time.Millisecond {
				t.Errorf("the steps sum to %s of %s", sum, whole)
			}
			if err := errors.Join(m.Wake(t.Context()), m.Settled()); err != nil {
				t.Fatal(err)
			}
			if err := errors.Join(m.Close(), m.Close()); err != nil {
				t.Fatal(err)
			}
			want := []string{"make jail", "make tap", "launch", "restore", "resume", "probe"}
			if tc.paused {
				want = append(want, "pause", "hurry", "resume")
			} else {
				want = append(want, "hurry")
			}
			want = append(want, "settle", "close machine", "close tap", "close jail")
			if diff := cmp.Diff(want, s.events()); diff != "" {
				t.Errorf("what happened (-want +got):\n%s", diff)
			}
			if packets, bytes, err := m.Egress(); packets != 3 || bytes != 180 || err != nil {
				t.Errorf("egress after close: %d, %d, %v", packets, bytes, err)
			}
			s.empty(t, p)
		})
	}
}

func TestCreateThatFailsLeavesNothing(t *testing.T) {
	broken := errors.New("broken")
	for what, step := range map[string]string{
		"make jail": StepLaunch, "make tap": StepLaunch, "launch": StepLaunch, "restore": StepLoad,
		"resume": StepResume, "probe": StepProbe, "pause": StepRest,
	} {
		t.Run(what, func(t *testing.T) {
			s := newStage()
			p, tmpl := made(t, s)
			s.fail[what] = broken
			m, err := p.Create(t.Context(), tmpl)
			if m != nil || !errors.Is(err, broken) {
				t.Fatalf("got %v, %v", m, err)
			}
			// A launch that fails ends the restore, which is then what is seen to fail.
			if !strings.Contains(err.Error(), ": "+step+": ") {
				t.Errorf("the error does not name the step %q: %v", step, err)
			}
			s.empty(t, p)
		})
	}
	t.Run("directory", func(t *testing.T) {
		s := newStage()
		p, tmpl := made(t, s)
		if err := os.Remove(p.config.DataDir + "/machines"); err != nil {
			t.Fatal(err)
		}
		if _, err := p.Create(t.Context(), tmpl); !errors.Is(err, os.ErrNotExist) {
			t.Fatalf("got %v", err)
		}
		if err := os.Mkdir(p.config.DataDir+"/machines", dirMode); err != nil {
			t.Fatal(err)
		}
		s.empty(t, p)
	})
}

func TestCreateJoinsErrorsOfCleanup(t *testing.T) {
	s := newStage()
	p, tmpl := made(t, s)
	broken, busy, stuck := errors.New("broken"), errors.New("tap busy"), errors.New("cgroup stuck")
	s.fail["probe"], s.fail["close tap"], s.fail["close jail"] = broken, busy, stuck
	_, err := p.Create(t.Context(), tmpl)
	for _, want := range []error{broken, busy, stuck} {
		if !errors.Is(err, want) {
			t.Errorf("%v is missing in: %v", want, err)
		}
	}
	if !slices.Contains(s.events(), "close machine") {
		t.Error("the machine was not closed")
	}
}

func TestCreateEndsWithItsContextAtEveryStep(t *testing.T) {
	for _, what := range []string{"launch", "restore", "resume", "probe", "pause"} {
		t.Run(what, func(t *testing.T) {
			s := newStage()
			p, tmpl := made(t, s)
			s.hang[what] = true
			gone := errors.New("caller left")
			ctx, cancel := context.WithCancelCause(t.Context())
			s.before = func(at string) {
				if at == what {
					time.AfterFunc(10*time.Millisecond, func() { cancel(gone) })
				}
			}
			if _, err := p.Create(ctx, tmpl); !errors.Is(err, gone) {
				t.Fatalf("got %v", err)
			}
			s.empty(t, p)
		})
	}
}

func TestCloseGoesOnAfterErrors(t *testing.T) {
	s := newStage()
	p, tmpl := made(t, s)
	m, err := p.Create(t.Context(), tmpl)
	if err != nil {
		t.Fatal(err)
	}
	hung, busy := errors.New("VMM hung"), errors.New("tap busy")
	s.fail["close machine"], s.fail["close tap"] = hung, busy
	err = m.Close()
	if !errors.Is(err, hung) || !errors.Is(err, busy) || !strings.Contains(err.Error(), m.ID()) {
		t.Fatalf("got %v", err)
	}
	if again := m.Close(); again == nil || again.Error() != err.Error() {
		t.Errorf("the second close says %v", again)
	}
	if n := s.count("close machine"); n != 1 {
		t.Errorf("closed %d times", n)
	}
	s.empty(t, p)
}

func TestManyAtOnce(t *testing.T) {
	s := newStage()
	p, tmpl := made(t, s)
	var mu sync.Mutex
	seen := map[string]bool{}
	var wg sync.WaitGroup
	for range 50 {
		wg.Go(func() {
			m, err := p.Create(t.Context(), tmpl)
			if err != nil {
				t.Error(err)
				return
			}
			mu.Lock()
			if seen[m.ID()] || len(m.ID()) != 12 {
				t.Errorf("id %q", m.ID())
			}
			seen[m.ID()] = true
			mu.Unlock()
			for range 2 {
				wg.Go(func() { _ = m.Close() })
			}
		})
	}
	wg.Wait()
	s.empty(t, p)
}

func TestCloseOfProvisionerClosesWhatIsOpen(t *testing.T) {
	s := newStage()
	p, tmpl := made(t, s)
	for range 3 {
		if _, err := p.Create(t.Context(), tmpl); err != nil {
			t.Fatal(err)
		}
	}
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	s.empty(t, p)
	if log := s.events(); log[len(log)-1] != "close host" {
		t.Errorf("the host was not closed last: %v", log)
	}
	if _, err := p.Create(t.Context(), tmpl); !errors.Is(err, ErrClosed) {
		t.Errorf("create afterwards: %v", err)
	}
	if _, err := p.Template(t.Context(), tmpl.Image, tmpl.Shape, nil); !errors.Is(err, ErrClosed) {
		t.Errorf("template afterwards: %v", err)
	}
}

// A creation that is cut short says so, whatever the step that was cut makes of it.
func TestCutCreationNamesItsCause(t *testing.T) {
	s := newStage()
	p, tmpl := made(t, s)
	ctx, cancel := context.WithCancelCause(t.Context())
	cause := errors.New("enough")
	s.before = func(what string) {
		if what == "probe" {
			cancel(cause)
		}
	}
	s.fail["probe"] = errors.New("connection closed")
	if _, err := p.Create(ctx, tmpl); !errors.Is(err, cause) || !errors.Is(err, s.fail["probe"]) {
		t.Errorf("created with %v, want both the cause and what broke", err)
	}
	s.empty(t, p)
}
