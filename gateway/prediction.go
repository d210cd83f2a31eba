package gateway

import (
	"context"
	"fmt"
	"net/http"

	"github.com/gofiber/fiber/v2"

	"github.com/ephemeral-run/ephemeral/run"
	"github.com/ephemeral-run/ephemeral/run/pools"
)

// Bounds of a prediction, so that one request cannot keep a server busy.
const (
	maxSimulatedMachines = 10_000
	maxSimulatedMemory   = 1 << 20 // MiB
	maxSimulatedRate     = 1000    // claims a second
	maxSimulatedSeconds  = 3600
	minSimulated         = 0.001 // claims a second, or seconds: rarer claims would take longer than a clock can count
)

// predictPool answers POST /v1/pools/{name}/prediction.
func (s *Server) predictPool(ctx context.Context, c *fiber.Ctx, _ run.Key) error {
	store, err := s.pools()
	if err != nil {
		return err
	}
	if s.deps.Predict == nil {
		return fmt.Errorf("prediction: %w", run.ErrNotFound)
	}
	if _, err := store.Get(ctx, c.Params("name")); err != nil {
		return err
	}
	size := pools.Sizing{MemoryMiB: 512, ServiceSeconds: 1, RestoreSeconds: 0.25}
	err = s.readFields(ctx, c, func(d *decoder, name string) error { return sizingMember(d, name, &size) }, func(v *violations) {
		v.number("min_ready", int64(size.MinReady), 0, maxSimulatedMachines)
		v.number("max_ready", int64(size.MaxReady), int64(max(size.MinReady, 1)), maxSimulatedMachines)
		v.number("max_machines", int64(size.MaxMachines), int64(max(size.MinReady, 1)), maxSimulatedMachines)
		v.number("memory_mib", int64(size.MemoryMiB), 1, maxSimulatedMemory)
		between := func(field string, value, most float64) {
			if !(value >= minSimulated && value <= most) {
				v.invalid(field, "must be at least %g and at most %g", minSimulated, most)
			}
		}
		between("claims_per_second", size.ClaimsPerSecond, maxSimulatedRate)
		between("service_seconds", size.ServiceSeconds, maxSimulatedSeconds)
		between("restore_seconds", size.RestoreSeconds, maxSimulatedSeconds)
	})
	if err != nil {
		return err
	}
	prediction, err := s.deps.Predict(ctx, size)
	if err != nil {
		return err
	}
	return sendJSON(c, http.StatusOK, prediction)
}

// sizingMember reads one member of a sizing.
func sizingMember(d *decoder, name string, s *pools.Sizing) error {
	whole := func(into *int) error {
		var n int64
		err := d.integer(name, &n)
		*into = int(n)
		return err
	}
	switch name {
	case "min_ready":
		return whole(&s.MinReady)
	case "max_ready":
		return whole(&s.MaxReady)
	case "max_machines":
		return whole(&s.MaxMachines)
	case "memory_mib":
		return whole(&s.MemoryMiB)
	case "claims_per_second":
		return d.number(name, &s.ClaimsPerSecond)
	case "service_seconds":
		return d.number(name, &s.ServiceSeconds)
	case "restore_seconds":
		return d.number(name, &s.RestoreSeconds)
	}
	return errUnknownField
}
