package broker

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"

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
	url        string // of chat/completions
	key        secret.Value
	limitField string
	client     http.RoundTripper
	has        func(name string) bool
	close      func()
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
		url: "http://replay.invalid/v1/chat/completions", limitField: fieldMaxCompletionTokens,
		client: player, has: player.Has, close: func() {},
	}
}

// openAIProvider returns nil when the provider is not configured: the official service without a key is no use.
func openAIProvider(cfg Config) (*provider, error) {
	base, err := url.Parse(cfg.OpenAIBaseURL)
	if err != nil {
		return nil, errors.New("the base URL is no URL") // the parser's error would show it, and it may hold a password
	}
	if base.Scheme != "http" && base.Scheme != "https" || base.Host == "" || base.User != nil || base.RawQuery != "" || base.Fragment != "" {
		return nil, errors.New("the base URL must be http(s)://host[:port][/path]")
	}
	if strings.ContainsAny(string(cfg.OpenAIAPIKey), "\r\n\x00") {
		return nil, errors.New("the API key holds a line break")
	}
	official := base.Hostname() == "api.openai.com"
	if official && cfg.OpenAIAPIKey == "" {
		return nil, nil
	}
	limit := cfg.OpenAILimit
	switch {
	case limit == "" && official:
		limit = fieldMaxCompletionTokens
	case limit == "":
		limit = fieldMaxTokens
	case limit != fieldMaxTokens && limit != fieldMaxCompletionTokens:
		return nil, fmt.Errorf("limit field %q: want %s or %s", limit, fieldMaxTokens, fieldMaxCompletionTokens)
	}
	transport := &http.Transport{
		Proxy:                  http.ProxyFromEnvironment,
		ForceAttemptHTTP2:      true,
		MaxIdleConns:           256,
		MaxIdleConnsPerHost:    64,
		IdleConnTimeout:        90 * time.Second,
		TLSHandshakeTimeout:    10 * time.Second,
		MaxResponseHeaderBytes: 64 << 10,
		DisableCompression:     true, // a compressed answer could not be bounded, nor streamed at once
	}
	return &provider{
		url: base.JoinPath("chat", "completions").String(), key: cfg.OpenAIAPIKey, limitField: limit,
		client: transport, has: func(string) bool { return true }, close: transport.CloseIdleConnections,
	}, nil
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
