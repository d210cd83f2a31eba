// Package broker is the host's service through which a machine reaches models, connections and the web. It is the only holder of credentials.
//
// A run's identity is the handler that serves its machine's connections, never something the guest says. Every call is
// checked against what the run allows, its worst case is authorised against the run's money before it is made, and what
// it really cost is captured afterwards, never more than was authorised:
//
//   - Worst case: the input has at most one token for every byte of the request as it is sent upstream, plus a margin for
//     what the provider wraps around it; the output has at most the tokens that the request allows, cut down to what
//     the run can pay.
//   - A finished call costs what the provider's usage says, at the price of the model.
//   - A call whose usage is missing or makes no sense, or whose answer broke off, or that was abandoned, is estimated: as
//     many input tokens as in the worst case, and one output token for every byte of text that came. The event says so.
//   - A call that failed before any of its answer reached the guest costs nothing.
//   - A call to a connection or the web costs its fixed price once its upstream began to answer.
//
// ROUTES.md has the routes that a machine sees.
package broker

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"time"

	"github.com/ephemeral-run/ephemeral/broker/outbound"
	"github.com/ephemeral-run/ephemeral/broker/price"
	"github.com/ephemeral-run/ephemeral/broker/replay"
	"github.com/ephemeral-run/ephemeral/broker/secret"
	"github.com/ephemeral-run/ephemeral/broker/web"
	"github.com/ephemeral-run/ephemeral/run"
	"github.com/ephemeral-run/ephemeral/run/connection"
	"github.com/ephemeral-run/ephemeral/run/receipt"
)

// Config is how a broker is set up.
type Config struct {
	DefaultModel  string        `env:"EPHEMERAL_DEFAULT_MODEL" envDefault:"replay/sandbox-proof" help:"model of runs that name none"`
	PriceFile     string        `env:"EPHEMERAL_PRICES" help:"YAML file with prices, on top of the built-in ones"`
	OpenAIBaseURL string        `env:"EPHEMERAL_OPENAI_BASE_URL" envDefault:"https://api.openai.com/v1" help:"base URL of the OpenAI-compatible provider behind openai/ models"`
	OpenAIAPIKey  secret.Value  `env:"EPHEMERAL_OPENAI_API_KEY" secret:"true" help:"API key of that provider; without it only another base URL is used"`
	OpenAILimit   string        `env:"EPHEMERAL_OPENAI_LIMIT_FIELD" help:"field that limits output: max_tokens or max_completion_tokens (empty: the latter for api.openai.com, else the former)"`
	ProviderFile  string        `env:"EPHEMERAL_PROVIDERS" help:"YAML file of further OpenAI-compatible providers, each by the prefix of its models"`
	ReplayDir     string        `env:"EPHEMERAL_REPLAY_DIR" help:"directory of conversation files for replay/ models, on top of the built-in ones"`
	CallTimeout   time.Duration `env:"EPHEMERAL_MODEL_TIMEOUT" envDefault:"10m" help:"longest time of one model call, retries included"`
	IdleTimeout   time.Duration `env:"EPHEMERAL_MODEL_IDLE_TIMEOUT" envDefault:"2m" help:"longest silence of a model's provider"`
	Attempts      int           `env:"EPHEMERAL_MODEL_ATTEMPTS" envDefault:"4" help:"how often a model call is tried"`
	CircuitAfter  int           `env:"EPHEMERAL_MODEL_CIRCUIT_AFTER" envDefault:"10" help:"failed attempts in a row after which a provider is left alone for a while"`
	CircuitPause  time.Duration `env:"EPHEMERAL_MODEL_CIRCUIT_PAUSE" envDefault:"10s" help:"how long such a provider is left alone before one call tries it again"`
	MaxConcurrent int           `env:"EPHEMERAL_RUN_MODEL_CONCURRENCY" envDefault:"8" help:"model calls of one run at once; more wait"`
	MaxCalls      int           `env:"EPHEMERAL_RUN_MODEL_CALLS" envDefault:"1000" help:"requests to the broker that one run may make"`
	CallRate      int           `env:"EPHEMERAL_RUN_CALL_RATE" envDefault:"50" help:"requests a second to the broker that one run may make; twice as many at once"`
	// ConnectionAllow are ranges that connections may lead to although they are not public.
	ConnectionAllow []string `env:"EPHEMERAL_CONNECTION_ALLOW" help:"address ranges that connections may lead to although they are not public, e.g. 10.1.0.0/16"`

	Web web.Config
	// Connections finds the connections of organisations; nil: there are none.
	Connections ConnectionStore
	// Sealing opens their credentials; nil: only connections without one can be used.
	Sealing *connection.Keyring
	// Receipts signs the events of outward calls; nil: they are not signed.
	Receipts *receipt.Signer
	// Log takes what operators should know; nil: slog's default. It never gets content or credentials.
	Log *slog.Logger
}

// Ledger is the money of one run. Errors are those of the run package: ErrBudget refuses, ErrUnavailable may be repeated.
type Ledger interface {
	Authorize(ctx context.Context, c run.Call) (granted run.Micros, err error)
	Capture(ctx context.Context, callID string, amount run.Micros) error
	Void(ctx context.Context, callID string) error
}

// Broker reaches the providers for every run of a node. It is safe for concurrent use.
type Broker struct {
	cfg       Config
	log       *slog.Logger
	prices    *price.Table
	providers map[string]*provider
	scrubber  *secret.Scrubber
	web       *web.Client
	dialer    *outbound.Dialer // of connections
	outbound  *http.Transport  // of connections
	upstreams upstreams
	sleep     func(ctx context.Context, d time.Duration) error
	// bodyTimeout is how long a guest may take to send a request's body.
	bodyTimeout time.Duration
}

// New checks the configuration, reads prices and conversations, and makes no connection.
func New(cfg Config) (*Broker, error) {
	cfg = cfg.withDefaults()
	if cfg.Attempts < 1 || cfg.MaxConcurrent < 1 || cfg.MaxCalls < 1 || cfg.CallRate < 1 || cfg.CircuitAfter < 1 || cfg.CircuitPause <= 0 || cfg.CallTimeout <= 0 || cfg.IdleTimeout <= 0 {
		return nil, errors.New("broker: attempts, concurrency, calls, rate and timeouts must be above zero")
	}
	prices, err := price.Load(cfg.PriceFile)
	if err != nil {
		return nil, fmt.Errorf("broker: %w", err)
	}
	conversations, err := replay.Load(cfg.ReplayDir)
	if err != nil {
		return nil, fmt.Errorf("broker: %w", err)
	}
	b := &Broker{
		cfg: cfg, log: cfg.Log, prices: prices, sleep: sleep, bodyTimeout: bodyTimeout,
		providers: map[string]*provider{"replay": replayProvider(replay.NewPlayer(conversations))},
	}
	allow, err := outbound.ParsePrefixes(cfg.ConnectionAllow)
	if err != nil {
		return nil, fmt.Errorf("broker: connections: %w", err)
	}
	b.dialer = &outbound.Dialer{Policy: outbound.Policy{Allow: allow}}
	b.outbound = b.dialer.Transport()
	if b.web, err = web.New(cfg.Web); err != nil {
		return nil, fmt.Errorf("broker: %w", err)
	}
	upstream, err := upstreamProviders(cfg)
	if err != nil {
		return nil, fmt.Errorf("broker: %w", err)
	}
	var secrets []secret.Value
	for name, p := range upstream {
		b.providers[name] = p
		p.circuit = newCircuit(cfg, name, b.log)
		for _, v := range p.secrets() {
			if secrets = append(secrets, v); len(v) < secret.MinLength {
				b.log.Warn("a provider's key or header is too short to be found in answers", "provider", name, "shorter_than", secret.MinLength)
			}
		}
	}
	b.scrubber = secret.NewScrubber(secrets...)
	if !b.HasModel(cfg.DefaultModel) {
		return nil, fmt.Errorf("broker: default model %q: no such model, or it has no price", cfg.DefaultModel)
	}
	return b, nil
}

// withDefaults fills in what a Config made by hand leaves out. The values are those of the envDefault tags.
func (c Config) withDefaults() Config {
	def := func(have *time.Duration, d time.Duration) {
		if *have == 0 {
			*have = d
		}
	}
	num := func(have *int, n int) {
		if *have == 0 {
			*have = n
		}
	}
	if c.DefaultModel == "" {
		c.DefaultModel = "replay/sandbox-proof"
	}
	if c.OpenAIBaseURL == "" {
		c.OpenAIBaseURL = officialBaseURL
	}
	if c.Log == nil {
		c.Log = slog.Default()
	}
	def(&c.CallTimeout, 10*time.Minute)
	def(&c.IdleTimeout, 2*time.Minute)
	num(&c.Attempts, 4)
	num(&c.MaxConcurrent, 8)
	num(&c.MaxCalls, 1000)
	num(&c.CallRate, 50)
	num(&c.CircuitAfter, 10)
	def(&c.CircuitPause, 10*time.Second)
	c.Web = c.Web.WithDefaults()
	return c
}

// HasModel tells whether runs may name this model: its provider is configured and it has a price.
func (b *Broker) HasModel(id string) bool {
	_, _, _, ok := b.model(id)
	return ok
}

// DefaultModel is the model of runs that name none.
func (b *Broker) DefaultModel() string { return b.cfg.DefaultModel }

// Prices are what this broker charges by, and what compute costs.
func (b *Broker) Prices() price.Table { return *b.prices }

// Providers are the names of the configured providers, sorted.
func (b *Broker) Providers() []string {
	var names []string
	for name := range b.providers {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// Close gives idle connections to providers back.
func (b *Broker) Close() {
	for _, p := range b.providers {
		p.close()
	}
	b.web.Close()
	b.outbound.CloseIdleConnections()
}

func sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-t.C:
		return nil
	}
}
