package gateway

import (
	"errors"
	"fmt"
	"time"

	"github.com/caarlos0/env/v11"

	"github.com/ephemeral-run/ephemeral/run"
)

// Config is how a gateway listens and what it tolerates. A field left zero has its default.
type Config struct {
	Listen         string        `env:"EPHEMERAL_LISTEN" envDefault:"127.0.0.1:8080" help:"address of the public API"`
	AdminListen    string        `env:"EPHEMERAL_ADMIN_LISTEN" envDefault:"127.0.0.1:9090" help:"address of metrics and detailed health; keep it private"`
	BodyLimit      int           `env:"EPHEMERAL_BODY_LIMIT" envDefault:"16777216" help:"largest request body in bytes"`
	BodyMemory     int           `env:"EPHEMERAL_BODY_MEMORY" envDefault:"134217728" help:"bytes of request bodies held at once, and as many of large answers; further ones wait"`
	HeaderLimit    int           `env:"EPHEMERAL_HEADER_LIMIT" envDefault:"16384" help:"largest request line and header in bytes"`
	MaxConnections int           `env:"EPHEMERAL_MAX_CONNECTIONS" envDefault:"8192" help:"connections at once, event streams included"`
	TLSCert        string        `env:"EPHEMERAL_TLS_CERT" help:"PEM file of the public API's certificate and its chain; a changed file is served by itself (empty: plain HTTP)"`
	TLSKey         string        `env:"EPHEMERAL_TLS_KEY" help:"PEM file of the certificate's key"`
	CORSOrigins    []string      `env:"EPHEMERAL_CORS_ORIGINS" help:"origins whose pages may call the API from a browser, comma-separated, or * (empty: none)"`
	RateLimit      int           `env:"EPHEMERAL_RATE_LIMIT" envDefault:"5000" help:"requests a second that an API key may make on average, over all gateways (-1: no limit)"`
	RateBurst      int           `env:"EPHEMERAL_RATE_BURST" envDefault:"10000" help:"requests that an API key may make at once"`
	ReadTimeout    time.Duration `env:"EPHEMERAL_READ_TIMEOUT" envDefault:"30s" help:"how long a client may take to send one request"`
	WriteTimeout   time.Duration `env:"EPHEMERAL_WRITE_TIMEOUT" envDefault:"10s" help:"how long a client may take to accept one write"`
	IdleTimeout    time.Duration `env:"EPHEMERAL_IDLE_TIMEOUT" envDefault:"75s" help:"how long an unused connection stays open"`
	StoreTimeout   time.Duration `env:"EPHEMERAL_STORE_TIMEOUT" envDefault:"10s" help:"how long one request may wait for the store"`
	MaxWait        time.Duration `env:"EPHEMERAL_MAX_WAIT" envDefault:"60s" help:"longest wait granted to Prefer: wait"`
	Heartbeat      time.Duration `env:"EPHEMERAL_HEARTBEAT" envDefault:"15s" help:"time between heartbeats of a silent event stream"`
	DrainTimeout   time.Duration `env:"EPHEMERAL_DRAIN_TIMEOUT" envDefault:"20s" help:"how long answers in flight may take at shutdown"`

	Uploads UploadConfig
	Signup  SignupConfig
}

// Address is where the public API is, as a URL.
func (c Config) Address() string {
	if c.TLSCert != "" {
		return "https://" + c.Listen
	}
	return "http://" + c.Listen
}

// maxRate bounds what a key may be allowed.
const maxRate = 1_000_000

// NoRateLimit is a RateLimit without a limit; 0 is the default.
const NoRateLimit = -1

// rate is the limit of each API key.
func (c Config) rate() run.Rate {
	return run.Rate{PerSecond: max(c.RateLimit, 0), Burst: c.RateBurst}
}

// Validate says what is wrong with the configuration, before anything is started.
func (c Config) Validate() error {
	c, err := c.withDefaults()
	if err == nil {
		_, err = newCORS(c.CORSOrigins)
	}
	return err
}

// withDefaults fills the fields left zero and checks the rest.
func (c Config) withDefaults() (Config, error) {
	err := env.ParseWithOptions(&c, env.Options{
		Environment:                  map[string]string{},
		SetDefaultsForZeroValuesOnly: true,
	})
	if err != nil {
		return Config{}, fmt.Errorf("fill gateway configuration: %w", err)
	}
	switch {
	case (c.TLSCert == "") != (c.TLSKey == ""):
		return Config{}, errors.New("EPHEMERAL_TLS_CERT and EPHEMERAL_TLS_KEY: give both or none")
	case c.RateLimit > 0 && (c.RateLimit > maxRate || c.RateBurst < 1 || c.RateBurst > maxRate):
		return Config{}, fmt.Errorf("EPHEMERAL_RATE_LIMIT %d and EPHEMERAL_RATE_BURST %d: want 1 to %d each", c.RateLimit, c.RateBurst, maxRate)
	case c.MaxConnections < 1:
		return Config{}, fmt.Errorf("EPHEMERAL_MAX_CONNECTIONS %d: want a positive number", c.MaxConnections)
	}
	if err := errors.Join(c.Uploads.check(), c.Signup.check()); err != nil {
		return Config{}, err
	}
	return c, nil
}
