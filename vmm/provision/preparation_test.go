package provision

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/ephemeral-run/ephemeral/vmm"
)

// preparing is a provisioner whose agent prepares, with a template.
func preparing(t *testing.T, s *stage, rest Rest) (*Provisioner, vmm.Template) {
	t.Helper()
	p, tmpl := made(t, s)
	c := p.config
	c.Rest = rest
	agent := s.agent()
	agent.Prepare = func(ctx context.Context, _ vmm.Machine) (vmm.Clock, error) {
		if err := s.do(ctx, "prepare"); err != nil {
			return nil, err
		}
		s.add("clock", 1)
		return &fakeClock{stage: s, ended: make(chan struct{})}, nil
	}
	p, err := prepare(c, s, agent)
	if err != nil {
		t.Fatal(err)
	}
	p.host = s
	return p, tmpl
}

var toReady = []string{"make jail", "make tap", "launch", "restore", "resume", "probe"}

var undone = []string{"close machine", "close tap", "close jail"}

func TestPreparesBesideAReadyMachine(t *testing.T) {
	for rest, want := range map[Rest][]string{RestPaused: {"prepare", "pause", "hurry", "resume"}, RestRunning: {"prepare"}} {
		s := newStage()
		p, tmpl := preparing(t, s, rest)
		m, err := p.Create(t.Context(), tmpl)
		if err != nil {
			t.Fatal(err)
		}
		var names []string
		for _, step := range m.Steps() {
			names = append(names, step.Name)
		}
		if diff := cmp.Diff([]string{StepLaunch, StepLoad, StepResume, StepProbe}, names); diff != "" {
			t.Errorf("steps to a ready machine (-want +got):\n%s", diff)
		}
		if err := errors.Join(m.Rested(t.Context()), m.Wake(t.Context()), m.Close()); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(slices.Concat(toReady, want, undone), s.events()); diff != "" {
			t.Errorf("%s: what happened (-want +got):\n%s", rest, diff)
		}
		s.empty(t, p)
	}
}

// A claim in the middle of a preparation waits for its end, and finds the machine running.
func TestClaimInTheMiddleOfAPreparation(t *testing.T) {
	for _, rest := range []Rest{RestPaused, RestRunning} {
		s := newStage()
		begun, goOn := make(chan struct{}), make(chan struct{})
		s.before = func(what string) {
			if what == "prepare" {
				close(begun)
				<-goOn
			}
		}
		p, tmpl := preparing(t, s, rest)
		m, err := p.Create(t.Context(), tmpl)
		if err != nil {
			t.Fatal(err)
		}
		<-begun
		gone := errors.New("caller left")
		ctx, cancel := context.WithCancelCause(t.Context())
		cancel(gone)
		if err := m.Wake(ctx); !errors.Is(err, gone) {
			t.Errorf("waking in a preparation, with no time: %v", err)
		}
		woken := make(chan error, 1)
		go func() { woken <- m.Wake(t.Context()) }()
		select {
		case err := <-woken:
			t.Fatalf("woken in the middle of the preparation: %v", err)
		case <-time.After(10 * time.Millisecond):
		}
		close(goOn)
		if err := errors.Join(<-woken, m.Close()); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(slices.Concat(toReady, []string{"prepare"}, undone), s.events()); diff != "" {
			t.Errorf("%s: what happened (-want +got):\n%s", rest, diff)
		}
		s.empty(t, p)
	}
}

// failures is an observer that keeps them.
type failures chan error

func (failures) Created([]Step)                   {}
func (failures) Rested([]Step)                    {}
func (f failures) CreateFailed(_ string, e error) { f <- e }
func (failures) Closed(time.Duration, error)      {}

func TestPreparationThatFailsEndsTheMachine(t *testing.T) {
	broken := errors.New("broken")
	for _, what := range []string{"prepare", "pause"} {
		s := newStage()
		p, tmpl := preparing(t, s, RestPaused)
		s.fail[what] = broken
		seen := make(failures, 1)
		p.Observe(seen)
		m, err := p.Create(t.Context(), tmpl)
		if err != nil {
			t.Fatal(err)
		}
		<-m.Done()
		if got := FailureReason(<-seen); got != map[string]string{"prepare": StepPrepare, "pause": StepRest}[what] {
			t.Errorf("the reason told is %q", got)
		}
		if !errors.Is(m.Err(), broken) {
			t.Errorf("it ended with %v", m.Err())
		}
		if err := m.Rested(t.Context()); !errors.Is(err, broken) {
			t.Errorf("rested: %v", err)
		}
		if err := m.Wake(t.Context()); !errors.Is(err, broken) {
			t.Errorf("woken: %v", err)
		}
		if err := m.Close(); err != nil {
			t.Error(err)
		}
		s.empty(t, p)
	}
}

func TestCloseEndsAPreparation(t *testing.T) {
	for _, closing := range []string{"machine", "provisioner"} {
		s := newStage()
		p, tmpl := preparing(t, s, RestPaused)
		s.hang["prepare"] = true
		m, err := p.Create(t.Context(), tmpl)
		if err != nil {
			t.Fatal(err)
		}
		end := m.Close
		if closing == "provisioner" {
			end = p.Close
		}
		if err := end(); err != nil {
			t.Error(err)
		}
		s.empty(t, p)
	}
}

// A host whose cgroups cannot be written to wakes its machines nevertheless.
func TestWakesWithoutPriority(t *testing.T) {
	s := newStage()
	p, tmpl := preparing(t, s, RestPaused)
	s.fail["hurry"] = errors.New("read-only file system")
	m, err := p.Create(t.Context(), tmpl)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(m.Rested(t.Context()), m.Wake(t.Context()), m.Settled(), m.Close()); err != nil {
		t.Error(err)
	}
	if diff := cmp.Diff(slices.Concat(toReady, []string{"prepare", "pause", "hurry", "resume"}, undone), s.events()); diff != "" {
		t.Errorf("what happened (-want +got):\n%s", diff)
	}
	s.empty(t, p)
}
