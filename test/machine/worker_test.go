package machine

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"regexp"
	"strings"
	"sync"
	"testing"

	"github.com/ephemeral-run/ephemeral/broker"
	"github.com/ephemeral-run/ephemeral/guestagent/proto"
	"github.com/ephemeral-run/ephemeral/node/guest"
	"github.com/ephemeral-run/ephemeral/run"
)

// purse is an in-memory double of a run's hold: it pays what fits.
type purse struct {
	mu      sync.Mutex
	left    run.Micros
	granted map[string]run.Micros
}

func (p *purse) Authorize(_ context.Context, c run.Call) (run.Micros, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.left < c.Min {
		return 0, run.ErrBudget
	}
	g := min(p.left, c.Max)
	p.left -= g
	p.granted[c.ID] = g
	return g, nil
}

func (p *purse) Capture(_ context.Context, id string, amount run.Micros) error {
	return p.end(id, amount)
}

func (p *purse) Void(_ context.Context, id string) error { return p.end(id, 0) }

func (p *purse) end(id string, amount run.Micros) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	g, ok := p.granted[id]
	if !ok || amount > g {
		return fmt.Errorf("%d of %d for call %q", amount, g, id)
	}
	delete(p.granted, id)
	p.left += g - amount
	return nil
}

// session is a run's worker in a machine, and the broker that it talks to.
type session struct {
	machine *machine
	events  locked // what the broker and the worker reported
	log     locked // the broker's log
}

// locked is text that several write.
type locked struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *locked) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *locked) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// work runs the worker to its end, as a node does: the broker answers on the machine's socket.
func (s *session) work(t *testing.T, c broker.Config, prompt, model string) guest.Finished {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*commandLimit)
	defer cancel()
	c.Log = slog.New(slog.NewTextHandler(&s.log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	b, err := broker.New(c)
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	l, err := s.machine.Listen(proto.BrokerPort)
	if err != nil {
		t.Fatal(err)
	}
	id, err := run.NewID()
	if err != nil {
		t.Fatal(err)
	}
	handler := b.Handler(broker.Session{
		Run: id, Org: "o", Spec: &run.Spec{Prompt: prompt, Model: model, Shell: true},
		Ledger: &purse{left: 1_000_000, granted: make(map[string]run.Micros)},
		Emit:   func(e run.NewEvent) { fmt.Fprintf(&s.events, "%+v\n", e) },
	})
	serving, stop := context.WithCancel(ctx)
	served := make(chan error, 1)
	go func() { served <- handler.Serve(serving, l) }()
	finished, err := s.machine.guest.StartWorker(ctx, guest.Worker{Prompt: prompt, Model: model, Shell: true}, func(sh guest.Shell) error {
		fmt.Fprintf(&s.events, "%s\n%+v\n%s\n", sh.Command, sh.Exit, sh.Output)
		return nil
	})
	stop()
	if err := <-served; err != nil {
		t.Error(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	return finished
}

// TestAnswerFollowsTheMachine: the recorded conversation in machines that differ gives answers that differ. Nothing of
// them is canned.
func TestAnswerFollowsTheMachine(t *testing.T) {
	t.Parallel()
	h := commonHost(t)
	for _, c := range []struct{ name, change, user, curl string }{
		{"as it is", "true", "worker", "curl: (6) Could not resolve host: example.com"},
		{"another user", `sed -i 's/^worker:/builder:/' /etc/passwd /etc/group`, "builder", "curl: (6) Could not resolve host: example.com"},
		{"another curl", `printf '#!/bin/sh\necho "curl: (99) $0 is broken" >&2\nexit 99\n' > /usr/local/bin/curl && chmod 755 /usr/local/bin/curl`,
			"worker", "curl: (99) /usr/local/bin/curl is broken"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := &session{machine: h.start(t)}
			s.machine.must(t, shell("root", c.change))
			got := s.work(t, broker.Config{}, "Prove the sandbox.", "replay/sandbox-proof")
			if !got.OK {
				t.Fatalf("the worker failed: %+v", got)
			}
			for _, want := range []string{
				"1. Prime script output: 2 3 5 7 11 13 17 19 23 29 31 37 41 43 47\n",
				"2. whoami: " + c.user + "; pwd: " + s.machine.prepared.Scratch + "\n",
				"3. curl error: " + c.curl + "\n",
			} {
				if !strings.Contains(got.Output, want) {
					t.Errorf("no %q", want)
				}
			}
			listed := regexp.MustCompile(`(?m)^4\. /tmp/proof\.txt created; ls -l: -rw\S+ 1 ` + c.user + ` ` + c.user + ` +14 .* /tmp/proof\.txt$`)
			if !listed.MatchString(got.Output) {
				t.Errorf("not %s", listed)
			}
			if t.Failed() {
				t.Log(got.Output)
			}
		})
	}
}
