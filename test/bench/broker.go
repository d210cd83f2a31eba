package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"time"

	"github.com/ephemeral-run/ephemeral/broker"
	ledger "github.com/ephemeral-run/ephemeral/run"
	"github.com/ephemeral-run/ephemeral/run/receipt"
	"github.com/ephemeral-run/ephemeral/run/redisserver"
)

// brokerKey is the key that the double of a provider wants; nothing of it is secret.
const brokerKey = "bench-key-0123456789"

// brokers measures what the broker adds to a model call: the same call to the same local double of a provider, in turn
// directly and through the broker, with a real hold in a real Redis, events and receipts. The way to the broker is a unix
// socket, as from a machine.
func brokers(ctx context.Context, o options, data string) (rows []row, err error) {
	double, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("listen for the provider's double: %w", err)
	}
	upstream := &http.Server{Handler: http.HandlerFunc(doubleAnswers), ReadHeaderTimeout: time.Second}
	go func() { _ = upstream.Serve(double) }()
	defer upstream.Close()
	redis, err := redisserver.Start(ctx, filepath.Join(data, "broker-redis"), redisserver.Options{Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		return nil, fmt.Errorf("start a Redis: %w", err)
	}
	defer func() { err = errors.Join(err, redis.Close()) }()
	store, err := ledger.Open(ctx, ledger.Config{RedisURL: redis.URL()})
	if err != nil {
		return nil, fmt.Errorf("open the store: %w", err)
	}
	defer func() { err = errors.Join(err, store.Close()) }()
	base := "http://" + double.Addr().String() + "/v1"
	client, stop, err := brokered(ctx, store, base, filepath.Join(data, "broker.sock"))
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, stop()) }()
	direct := &http.Client{Transport: &http.Transport{}}
	defer direct.CloseIdleConnections()
	for _, m := range []struct {
		name, body string
		most       float64
	}{
		{"broker.call", `{"model":"openai/gpt-5-nano","messages":[{"role":"user","content":"hello"}],"max_tokens":100}`, 1.0},
		{"broker.first_token", `{"model":"openai/gpt-5-nano","stream":true,"messages":[{"role":"user","content":"hello"}],"max_tokens":100}`, 2.0},
	} {
		plain, through, added, err := compare(ctx, 25*o.rounds, direct, base+"/chat/completions", client, m.body)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", m.name, err)
		}
		r := measured(m.name, "ms", added)
		r.most = m.most
		rows = append(rows, measured(m.name+".direct", "ms", plain), measured(m.name+".through", "ms", through), r)
	}
	return rows, nil
}

// doubleAnswers is a double of a provider: it answers at once, whole or as a stream of twenty pieces.
func doubleAnswers(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	const usage = `"usage":{"prompt_tokens":10,"completion_tokens":20}`
	if !strings.Contains(string(body), `"stream":true`) {
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, `{"id":"x","object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":"hello"},"finish_reason":"stop"}],`+usage+`}`)
		return
	}
	w.Header().Set("Content-Type", "text/event-stream")
	for range 20 {
		_, _ = io.WriteString(w, "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"hello \"}}]}\n\n")
		w.(http.Flusher).Flush()
	}
	_, _ = io.WriteString(w, "data: {\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"stop\"}]}\n\ndata: {\"choices\":[],"+usage+"}\n\ndata: [DONE]\n\n")
}

// compare makes the call n times each way, in turn, and returns the times of both and what the broker added in each pair.
func compare(ctx context.Context, n int, direct *http.Client, url string, client *http.Client, body string) (plain, through, added []time.Duration, err error) {
	for i := range n + 10 {
		a, err := callOnce(ctx, direct, url, body)
		if err != nil {
			return nil, nil, nil, fmt.Errorf("direct: %w", err)
		}
		b, err := callOnce(ctx, client, "http://broker/v1/chat/completions", body)
		if err != nil {
			return nil, nil, nil, fmt.Errorf("through the broker: %w", err)
		}
		if i >= 10 { // the first ones open connections
			plain, through, added = append(plain, a), append(through, b), append(added, b-a)
		}
	}
	return plain, through, added, nil
}

// callOnce makes one call and returns the time to its end, or of a stream to its first piece. It reads the rest too.
func callOnce(ctx context.Context, c *http.Client, url, body string) (time.Duration, error) {
	began := time.Now()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, strings.NewReader(body))
	if err != nil {
		return 0, err
	}
	req.Header.Set("Authorization", "Bearer "+brokerKey)
	resp, err := c.Do(req)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	lines := bufio.NewReader(resp.Body)
	if _, err := lines.ReadString('\n'); err != nil && !errors.Is(err, io.EOF) {
		return 0, err
	}
	took := time.Since(began)
	if _, err := io.Copy(io.Discard, lines); err != nil {
		return 0, err
	}
	if resp.StatusCode != http.StatusOK {
		return 0, fmt.Errorf("status %d", resp.StatusCode)
	}
	return took, nil
}

// brokered serves a broker for one run on a socket and returns a client of it.
func brokered(ctx context.Context, store *ledger.Store, base, socket string) (*http.Client, func() error, error) {
	lease, err := running(ctx, store)
	if err != nil {
		return nil, nil, err
	}
	signer, err := receipt.NewSigner(receipt.NewSeed())
	if err != nil {
		return nil, nil, err
	}
	b, err := broker.New(broker.Config{OpenAIBaseURL: base, OpenAIAPIKey: brokerKey, MaxCalls: 1 << 30, CallRate: 1 << 20, Receipts: signer, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		return nil, nil, err
	}
	ln, err := net.Listen("unix", socket)
	if err != nil {
		return nil, nil, fmt.Errorf("listen for the machine: %w", err)
	}
	handler := b.Handler(broker.Session{
		Run: lease.Run, Org: lease.Org, Spec: &lease.Spec, Ledger: hold{store, lease},
		Emit: func(e ledger.NewEvent) { _ = store.Append(ctx, lease, e) },
	})
	serving, cancel := context.WithCancel(ctx)
	served := make(chan error, 1)
	go func() { served <- handler.Serve(serving, ln) }()
	transport := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", socket)
	}}
	return &http.Client{Transport: transport}, func() error {
		cancel()
		err := <-served
		transport.CloseIdleConnections()
		b.Close()
		return err
	}, nil
}

// running is a run that a node works on.
func running(ctx context.Context, store *ledger.Store) (*ledger.Lease, error) {
	org, err := store.CreateOrg(ctx, ledger.Org{Name: "bench"})
	if err != nil {
		return nil, err
	}
	if _, err := store.Credit(ctx, org.ID, 1_000_000_000, "bench"); err != nil {
		return nil, err
	}
	spec := ledger.Spec{Prompt: "p", Model: "openai/gpt-5-nano", TimeoutSeconds: 3600, MaxCostMicros: 100_000_000}
	if _, _, err := store.Admit(ctx, ledger.Admission{Org: org.ID, Spec: spec, FirstSlice: 1}); err != nil {
		return nil, err
	}
	lease, err := store.Take(ctx, "bench")
	if err != nil {
		return nil, err
	}
	return lease, store.Start(ctx, lease, ledger.Start{At: time.Now(), Machine: "bench", Image: "none", Isolation: "emulated"})
}

// hold is the run's money in the store.
type hold struct {
	store *ledger.Store
	lease *ledger.Lease
}

func (h hold) Authorize(ctx context.Context, c ledger.Call) (ledger.Micros, error) {
	return h.store.Authorize(ctx, h.lease, c)
}

func (h hold) Capture(ctx context.Context, id string, amount ledger.Micros) error {
	return h.store.Capture(ctx, h.lease, id, amount)
}

func (h hold) Void(ctx context.Context, id string) error { return h.store.Void(ctx, h.lease, id) }
