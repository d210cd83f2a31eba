package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ephemeral-run/ephemeral/client"
	"github.com/ephemeral-run/ephemeral/run"
	"github.com/ephemeral-run/ephemeral/run/pools"
)

// load has runs carried out all the time, as many at once as there are machines.
type load struct {
	tenant *tenant

	mu      sync.Mutex
	ids     []run.ID // of all that were accepted
	quit    chan struct{}
	running sync.WaitGroup
}

// loadRequests are what it asks for, by turns.
var loadRequests = []client.Request{
	{Command: "true"}, {Command: "sleep 0.3; echo done"}, {Prompt: "Say hello.", Model: "replay/hello"}, {Command: "seq 3000; head -c 5000 /dev/urandom > left"},
}

func (l *load) note(id run.ID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ids = append(l.ids, id)
}

// start begins. Its clients repeat what is not answered, as clients do.
func (l *load) start(ctx context.Context, t *testing.T) {
	l.quit, l.ids = make(chan struct{}), nil
	for range huntMachines {
		l.running.Go(func() {
			for {
				select {
				case <-l.quit:
					return
				default:
				}
				created, err := l.tenant.CreateRun(ctx, loadRequests[rand.IntN(len(loadRequests))], client.CreateOptions{})
				if err == nil {
					l.note(created.Run.ID)
					_, err = l.tenant.Wait(ctx, created.Run.ID)
				}
				if err != nil {
					t.Errorf("a client under load: %v", err)
					return
				}
			}
		})
	}
}

// stop ends it when its runs have ended, and returns all that were noted since start.
func (l *load) stop() []run.ID {
	close(l.quit)
	l.running.Wait()
	return l.ids
}

// outcomes are what a run may come to when something is killed: that it succeeds, is cancelled at the end of a round, or one
// of these codes.
var outcomes = []string{"succeeded", "cancelled", "node_lost", "machine_lost", "agent_lost"}

// check waits until all is quiet, and looks whether everything is as it should be.
func (h *hunt) check(t *testing.T, k kill, ids []run.ID, dead []string) {
	t.Helper()
	ends := map[string]int{}
	for _, id := range ids {
		r := h.tenant.ended(t, id)
		end := string(r.State)
		if r.Error != nil {
			end = r.Error.Code
		}
		ends[end]++
		if !slices.Contains(outcomes, end) {
			t.Errorf("%s: run %s ended %s, %+v", k, id, r.State, r.Error)
		}
		checkMoney(t, r, r.Money.Reserved)
		checkOneEnd(t, r, h.tenant.events(t, id))
	}
	for end, n := range ends {
		h.ends[end] += n
	}
	h.runs += len(ids)
	if err := h.quiet(); err != nil {
		t.Errorf("%s: %v", k, err)
	}
	left, err := h.lookAround()
	if err != nil {
		t.Error(err)
	}
	for _, id := range left.ids() {
		if slices.Contains(dead, id) {
			t.Errorf("%s: left of machine %s: %+v", k, id, left)
		}
	}
	if !slices.Equal(left.rest, h.rest) {
		t.Errorf("%s: beside machines there is\n%q, there was\n%q", k, left.rest, h.rest)
	}
	h.checkBooks(t, k)
	if zombies := children(h.cmd.Process.Pid, "Z"); len(zombies) > 0 {
		t.Errorf("%s: nobody waited for %v", k, zombies)
	}
	h.last = fmt.Sprintf("%d runs: %v; %d machines in the pool, nothing else", len(ids), ends, len(left.ids()))
}

func (h *hunt) told() string { return h.last }

// checkOneEnd demands that a run has one terminal event, that of its state, and one last one.
func checkOneEnd(t *testing.T, r run.Run, events []run.Event) {
	t.Helper()
	var terminal, last int
	for _, e := range events {
		if run.State(e.Type).Terminal() {
			terminal++
			if string(e.Type) != string(r.State) {
				t.Errorf("run %s is %s and has an event %s", r.ID, r.State, e.Type)
			}
		}
		if e.Type == run.EventWorkerDestroyed {
			last++
		}
	}
	if terminal != 1 || last != 1 || events[len(events)-1].Type != run.EventWorkerDestroyed {
		t.Errorf("run %s, %s: %d terminal events, %d last ones: %+v", r.ID, r.State, terminal, last, events)
	}
}

// checkBooks demands that all money is accounted for, and none held.
func (h *hunt) checkBooks(t *testing.T, k kill) {
	t.Helper()
	out, errs, err := h.cli(t.Context(), nil, "orgs", "audit")
	if err != nil || !strings.Contains(out, "conserved") {
		t.Errorf("%s: audit: %v\n%s%s", k, err, out, errs)
	}
	if a, err := h.tenant.Account(t.Context()); err != nil || a.Held != 0 {
		t.Errorf("%s: account %+v, %v", k, a, err)
	}
}

// show reads what the node reports of its pools.
func (s *server) show(all *[]pools.Pool) error {
	out, errs, err := s.cli(context.Background(), nil, "pool", "show", "--output", "json")
	if err != nil {
		return fmt.Errorf("pool show: %w: %s", err, errs)
	}
	return json.Unmarshal([]byte(out), all)
}

// children are the processes that a process has started and not waited for, of one state (proc_pid_stat(5)).
func children(pid int, state string) (all []string) {
	files, _ := filepath.Glob("/proc/[0-9]*/stat") // the pattern is well-formed
	for _, file := range files {
		b, err := os.ReadFile(file)
		if err != nil {
			continue // it ended meanwhile
		}
		fields := strings.Fields(string(b[strings.LastIndexByte(string(b), ')')+1:]))
		if len(fields) > 1 && fields[0] == state && fields[1] == fmt.Sprint(pid) {
			all = append(all, string(b))
		}
	}
	return all
}

// redisPid is the process of a server's private Redis.
func redisPid(data string) (int, error) {
	conn, err := net.Dial("unix", filepath.Join(data, "redis", "redis.sock"))
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	raw, err := conn.(*net.UnixConn).SyscallConn()
	if err != nil {
		return 0, err
	}
	var peer *unix.Ucred
	var failed error
	if err := raw.Control(func(fd uintptr) { peer, failed = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }); err != nil {
		return 0, err
	}
	if failed != nil {
		return 0, failed
	}
	return int(peer.Pid), nil
}

// lastLines are at most n lines from the end of a text.
func lastLines(text string, n int) string {
	lines := strings.Split(text, "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}
