package gateway

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ephemeral-run/ephemeral/client"
	"github.com/ephemeral-run/ephemeral/run"
	"github.com/ephemeral-run/ephemeral/run/connection"
	"github.com/ephemeral-run/ephemeral/run/pools"
	"github.com/ephemeral-run/ephemeral/run/redisserver"
)

// redis is the server of all tests that need a real store; each has a cell of its own in it.
var (
	redis *redisserver.Server
	cells atomic.Int64
)

func withRedis(m *testing.M) int {
	dir, err := os.MkdirTemp("", "ephemeral-gateway-test-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	redis, err = redisserver.Start(ctx, dir, redisserver.Options{Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer redis.Close()
	return m.Run()
}

// live is a gateway on a real store, with an administrator's client.
type live struct {
	cell string
	*served
	t     testing.TB
	ctx   context.Context
	store *run.Store
	admin *client.Client

	rootSecret string
}

// newLive starts a gateway on a fresh cell.
func newLive(t *testing.T, cfg Config, options ...run.Option) *live {
	return liveOn(t, cfg, redis.URL(), options...)
}

func liveOn(t *testing.T, cfg Config, redisURL string, options ...run.Option) *live {
	t.Helper()
	return liveWith(t, cfg, run.Config{RedisURL: redisURL}, options...)
}

// liveWith is liveOn with more to say about the store. The cell is its own.
func liveWith(t *testing.T, cfg Config, stored run.Config, options ...run.Option) *live {
	t.Helper()
	stored.Cell = fmt.Sprintf("g%d", cells.Add(1))
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	t.Cleanup(cancel)
	store, err := run.Open(ctx, stored, options...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { store.Close() })
	l := &live{t: t, ctx: ctx, store: store, cell: stored.Cell}
	ring, err := connection.NewKeyring(connection.NewKey())
	if err != nil {
		t.Fatal(err)
	}
	l.served = serve(t, cfg, Deps{Store: store, Pools: pools.New(store), FirstSlice: 200, Sealing: ring})
	_, secret, err := store.CreateKey(ctx, "", "admin", run.Admin)
	if err != nil {
		t.Fatal(err)
	}
	l.admin, l.rootSecret = l.as(secret), secret
	return l
}

// as makes a client that uses the secret.
func (l *live) as(secret string) *client.Client {
	l.t.Helper()
	transport := &http.Transport{MaxIdleConnsPerHost: 64}
	l.t.Cleanup(transport.CloseIdleConnections)
	c, err := client.New(l.url, secret, client.WithTransport(described{l.t, transport}), client.WithMaxOutage(20*time.Second))
	if err != nil {
		l.t.Fatal(err)
	}
	return c
}

// member is one organisation's client.
type member struct {
	*client.Client
	org, secret, keyID string
}

// newMember makes an organisation with credit and a key.
func (l *live) newMember(org string, credit run.Micros) member {
	l.t.Helper()
	o, err := l.admin.CreateOrg(l.ctx, run.Org{ID: org, Name: org})
	l.must(err)
	if credit > 0 {
		_, err = l.admin.Credit(l.ctx, o.ID, credit, "start")
		l.must(err)
	}
	k, err := l.admin.CreateKey(l.ctx, o.ID, "test")
	l.must(err)
	return member{Client: l.as(k.Secret), org: org, secret: k.Secret, keyID: k.ID}
}

func (l *live) must(err error) {
	l.t.Helper()
	if err != nil {
		l.t.Fatal(err)
	}
}

// create posts a command.
func (l *live) create(m member) run.Run {
	l.t.Helper()
	c, err := m.CreateRun(l.ctx, client.Request{Command: "true"}, client.CreateOptions{})
	l.must(err)
	return c.Run
}

// take leases the next run, as a node does.
func (l *live) take() *run.Lease {
	l.t.Helper()
	ctx, cancel := context.WithTimeout(l.ctx, 10*time.Second)
	defer cancel()
	lease, err := l.store.Take(ctx, "n1")
	l.must(err)
	return lease
}

func (l *live) start(lease *run.Lease) {
	l.t.Helper()
	l.must(l.store.Start(l.ctx, lease, run.Start{At: time.Now(), Machine: "m1", Image: "base", Isolation: "emulated"}))
}

// shell appends an event whose output has size bytes.
func (l *live) shell(lease *run.Lease, size int) {
	l.t.Helper()
	output := make([]byte, size)
	for i := range output {
		output[i] = 'x'
	}
	l.must(l.store.Append(l.ctx, lease, run.NewEvent{Type: run.EventShell, At: time.Now(),
		Data: run.ShellData{Command: "echo", Outcome: "exited", Output: string(output), Bytes: int64(size)}}))
}

func (l *live) settle(lease *run.Lease) run.Run {
	l.t.Helper()
	l.must(l.store.Append(l.ctx, lease, run.NewEvent{Type: run.EventMicroVMDestroyed, At: time.Now(), Data: run.MicroVMDestroyedData{}}))
	code := 0
	r, err := l.store.Settle(l.ctx, lease, run.Outcome{At: time.Now(), State: run.Succeeded, Result: &run.Result{ExitCode: &code}})
	l.must(err)
	return r
}

// eventually waits until ok.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	deadline := time.Now().Add(15 * time.Second)
	for !ok() {
		if time.Now().After(deadline) {
			t.Fatalf("in 15 s not: %s", what)
		}
		time.Sleep(10 * time.Millisecond)
	}
}
