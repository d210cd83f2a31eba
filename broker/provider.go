package broker

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/sony/gobreaker/v2"

	"github.com/ephemeral-run/ephemeral/broker/price"
	"github.com/ephemeral-run/ephemeral/broker/replay"
	"github.com/ephemeral-run/ephemeral/broker/secret"
)

const officialBaseURL = "https://api.openai.com/v1"

// The fields that limit a call's output.
const (
	fieldMaxTokens           = "max_tokens"
	fieldMaxCompletionTokens = "max_completion_tokens"
)

// provider is one upstream that speaks the chat-completions protocol.
type provider struct {
	name        string
	url         string // of chat/completions
	key         secret.Value
	headers     map[string]secret.Value // beside the key
	limitField  string
	streamUsage bool // usage may be asked for in a stream
	client      http.RoundTripper
	has         func(name string) bool
	close       func()
	circuit     *gobreaker.TwoStepCircuitBreaker[any]
}

// model finds the provider, the name there and the price of a model id.
func (b *Broker) model(id string) (*provider, string, price.Model, bool) {
	prefix, name, ok := strings.Cut(id, "/")
	if !ok || name == "" || len(id) > 256 {
		return nil, "", price.Model{}, false
	}
	p := b.providers[prefix]
	if p == nil || !p.has(name) {
		return nil, "", price.Model{}, false
	}
	cost, ok := b.prices.Model(id)
	return p, name, cost, ok
}

func replayProvider(player *replay.Player) *provider {
	return &provider{
		name: "replay", url: "http://replay.invalid/v1/chat/completions", limitField: fieldMaxCompletionTokens, streamUsage: true,
		client: player, has: player.Has, close: func() {},
	}
}

// send makes one attempt. Nothing of the guest's request but the checked body goes along, redirects are not followed,
// and the answer's body fails when the provider is silent for longer than idle. Cancelling ctx ends the attempt.
func (p *provider) send(ctx context.Context, body string, stream bool, idle time.Duration) (*http.Response, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	watch := time.AfterFunc(idle, func() { cancel(errSilent) })
	stop := func() { watch.Stop(); cancel(nil) }
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, p.url, strings.NewReader(body))
	if err != nil {
		stop()
		return nil, fmt.Errorf("make request: %w", err)
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("User-Agent", "ephemeral")
	req.Header.Set("Accept", "application/json")
	if stream {
		req.Header.Set("Accept", "text/event-stream")
	}
	for name, value := range p.headers {
		req.Header.Set(name, string(value))
	}
	if p.key != "" {
		req.Header.Set("Authorization", "Bearer "+string(p.key))
	}
	resp, err := p.client.RoundTrip(req)
	if err != nil {
		cause := context.Cause(ctx)
		stop()
		if cause != nil {
			return nil, cause
		}
		return nil, err
	}
	watch.Reset(idle)
	resp.Body = &watchedBody{body: resp.Body, ctx: ctx, watch: watch, idle: idle, stop: stop}
	return resp, nil
}

var errSilent = errors.New("the provider was silent for too long")

// watchedBody pushes the watch back with every read, and gives the reason when a read fails because of it.
type watchedBody struct {
	body  io.ReadCloser
	ctx   context.Context
	watch *time.Timer
	idle  time.Duration
	stop  func()
}

func (b *watchedBody) Read(p []byte) (int, error) {
	n, err := b.body.Read(p)
	if n > 0 {
		b.watch.Reset(b.idle)
	}
	if err != nil && err != io.EOF {
		if cause := context.Cause(b.ctx); cause != nil {
			err = cause
		}
	}
	return n, err
}

func (b *watchedBody) Close() error {
	b.stop()
	return b.body.Close()
}
