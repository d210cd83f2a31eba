package gateway

import (
	"fmt"
	"time"

	"github.com/caarlos0/env/v11"
)

// Config is how a gateway listens and what it tolerates. A field left zero has its default.
type Config struct {
	Listen         string        `env:"EPHEMERAL_LISTEN" envDefault:"127.0.0.1:8080" help:"address of the public API"`
	AdminListen    string        `env:"EPHEMERAL_ADMIN_LISTEN" envDefault:"127.0.0.1:9090" help:"address of metrics and detailed health; keep it private"`
	BodyLimit      int           `env:"EPHEMERAL_BODY_LIMIT" envDefault:"16777216" help:"largest request body in bytes"`
	BodyMemory     int           `env:"EPHEMERAL_BODY_MEMORY" envDefault:"134217728" help:"bytes of request bodies held at once; further ones wait"`
	HeaderLimit    int           `env:"EPHEMERAL_HEADER_LIMIT" envDefault:"16384" help:"largest request line and header in bytes"`
	MaxConnections int           `env:"EPHEMERAL_MAX_CONNECTIONS" envDefault:"8192" help:"connections at once, event streams included"`
	ReadTimeout    time.Duration `env:"EPHEMERAL_READ_TIMEOUT" envDefault:"30s" help:"how long a client may take to send one request"`
	WriteTimeout   time.Duration `env:"EPHEMERAL_WRITE_TIMEOUT" envDefault:"10s" help:"how long a client may take to accept one write"`
	IdleTimeout    time.Duration `env:"EPHEMERAL_IDLE_TIMEOUT" envDefault:"75s" help:"how long an unused connection stays open"`
	StoreTimeout   time.Duration `env:"EPHEMERAL_STORE_TIMEOUT" envDefault:"10s" help:"how long one request may wait for the store"`
	MaxWait        time.Duration `env:"EPHEMERAL_MAX_WAIT" envDefault:"60s" help:"longest wait granted to Prefer: wait"`
	Heartbeat      time.Duration `env:"EPHEMERAL_HEARTBEAT" envDefault:"15s" help:"time between heartbeats of a silent event stream"`
	DrainTimeout   time.Duration `env:"EPHEMERAL_DRAIN_TIMEOUT" envDefault:"20s" help:"how long answers in flight may take at shutdown"`
}

// withDefaults fills the fields left zero.
func (c Config) withDefaults() (Config, error) {
	err := env.ParseWithOptions(&c, env.Options{
		Environment:                  map[string]string{},
		SetDefaultsForZeroValuesOnly: true,
	})
	if err != nil {
		return Config{}, fmt.Errorf("fill gateway configuration: %w", err)
	}
	return c, nil
}
