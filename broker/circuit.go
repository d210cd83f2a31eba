package broker

import (
	"context"
	"errors"
	"log/slog"
	"net/http"

	"github.com/sony/gobreaker/v2"
)

// errCircuit: the provider failed too often in a row and is left alone for a while.
var errCircuit = errors.New("the provider is left alone after failures")

// newCircuit leaves a provider alone for a while after failed attempts in a row, and then lets one attempt find out.
func newCircuit(cfg Config, name string, log *slog.Logger) *gobreaker.TwoStepCircuitBreaker[any] {
	return gobreaker.NewTwoStepCircuitBreaker[any](gobreaker.Settings{
		Name: name, MaxRequests: 1, Timeout: cfg.CircuitPause,
		ReadyToTrip: func(c gobreaker.Counts) bool { return int64(c.ConsecutiveFailures) >= int64(cfg.CircuitAfter) },
		OnStateChange: func(name string, from, to gobreaker.State) {
			log.Warn("a provider's circuit changed", "provider", name, "from", from.String(), "to", to.String())
		},
	})
}

// enter asks whether an attempt may be made. report takes how it went.
func (p *provider) enter() (report func(error), err error) {
	if p.circuit == nil {
		return func(error) {}, nil
	}
	return p.circuit.Allow()
}

// verdict is what an attempt says about the provider: an error only when the provider itself did not answer or failed. An
// attempt that was abandoned says nothing against it, nor does one that was refused for its own sake.
func verdict(ctx context.Context, resp *http.Response, err error) error {
	switch {
	case err != nil && (ctx.Err() == nil || errors.Is(err, errSilent)):
		return err
	case err == nil && resp.StatusCode >= 500 && resp.StatusCode != http.StatusNotImplemented:
		return errors.New(resp.Status)
	}
	return nil
}
