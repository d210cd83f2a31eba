package node

import (
	"context"
	"io"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/ephemeral-run/ephemeral/run"
	"github.com/ephemeral-run/ephemeral/run/redisserver"
)

// recorder is an executor that notes the images of its runs and ends them.
type recorder struct {
	store *run.Store
	mu    sync.Mutex
	ran   map[string]int
}

func (r *recorder) Execute(ctx context.Context, l *run.Lease) {
	r.mu.Lock()
	r.ran[l.Spec.ImageName()]++
	r.mu.Unlock()
	_, _ = r.store.Settle(ctx, l, run.Outcome{State: run.Failed}) // the test waits for the end of each run
}

// Of two nodes, one of which cannot make the template of an image, each takes what it has machines of; what none has waits, and is
// taken as soon as one has.
func TestNodesTakeWhatTheyHaveMachinesOf(t *testing.T) {
	quiet := slog.New(slog.NewTextHandler(io.Discard, nil))
	server, err := redisserver.Start(t.Context(), t.TempDir(), redisserver.Options{Log: quiet})
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	store, err := run.Open(t.Context(), run.Config{RedisURL: server.URL(), Lease: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	org, err := store.CreateOrg(t.Context(), run.Org{Name: "one"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := store.Credit(t.Context(), org.ID, 1_000_000, "first"); err != nil {
		t.Fatal(err)
	}
	admit := func(image string) run.ID {
		t.Helper()
		r, _, err := store.Admit(t.Context(), run.Admission{Org: org.ID, FirstSlice: 1, Spec: run.Spec{Command: "true", Image: image, TimeoutSeconds: 10, MaxCostMicros: 10}})
		if err != nil {
			t.Fatal(err)
		}
		return r.ID
	}
	ended := func(id run.ID) bool {
		t.Helper()
		r, err := store.Get(t.Context(), org.ID, id)
		if err != nil {
			t.Fatal(err)
		}
		return r.State.Terminal()
	}
	wait := func(id run.ID) {
		t.Helper()
		for deadline := time.Now().Add(30 * time.Second); !ended(id); time.Sleep(10 * time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("%s does not end", id)
			}
		}
	}
	var mu sync.Mutex
	able := map[string][]string{"n1": {"base"}, "n2": {"base", "data"}}
	set := func(name string, images ...string) {
		mu.Lock()
		defer mu.Unlock()
		able[name] = images
	}
	ctx, stop := context.WithCancel(t.Context())
	var nodes sync.WaitGroup
	recorders := map[string]*recorder{}
	begin := func(name string) {
		r := &recorder{store: store, ran: map[string]int{}}
		recorders[name] = r
		n, err := New(name, Config{Concurrency: 2, Drain: time.Second}, time.Minute, store, r, quiet)
		if err != nil {
			t.Fatal(err)
		}
		n.SetImages(func() []string {
			mu.Lock()
			defer mu.Unlock()
			return able[name]
		})
		nodes.Go(func() {
			if err := n.Run(ctx); err != nil {
				t.Error(err)
			}
		})
	}
	defer nodes.Wait()
	defer stop()

	begin("n1")
	waits := admit("data")
	wait(admit("base"))
	wait(admit(""))
	if ended(waits) {
		t.Fatal("a node took a run of an image that it has no machine of")
	}
	begin("n2")
	wait(waits)
	set("n2") // its templates are gone: now neither has machines of data
	waits = admit("data")
	wait(admit("base"))
	if ended(waits) {
		t.Fatal("a node took a run of an image that no node has a machine of")
	}
	set("n1", "base", "data")
	wait(waits)
	stop()
	nodes.Wait()
	if n := recorders["n1"].ran["data"]; n != 1 {
		t.Errorf("n1 ran data %d times, want 1", n)
	}
	if n := recorders["n2"].ran["data"]; n != 1 {
		t.Errorf("n2 ran data %d times, want 1", n)
	}
}
