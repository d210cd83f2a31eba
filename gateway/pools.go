package gateway

import (
	"context"
	"errors"
	"fmt"
	"net/http"

	"github.com/gofiber/fiber/v2"

	"github.com/ephemeral-run/ephemeral/run"
	"github.com/ephemeral-run/ephemeral/run/pools"
)

// Pools keeps what operators want of pools and what nodes report of theirs; *pools.Store is one.
type Pools interface {
	List(ctx context.Context) ([]pools.Pool, error)
	Get(ctx context.Context, name string) (pools.Pool, error)
	Set(ctx context.Context, name string, p pools.Policy, replaces int64) (pools.Desired, error)
}

var _ Pools = (*pools.Store)(nil)

type poolList struct {
	Pools []pools.Pool `json:"pools"`
}

// maxDrained is how many nodes one request may drain.
const maxDrained = 1000

// pools are those of the cell. A gateway that was given none has none.
func (s *Server) pools() (Pools, error) {
	if s.deps.Pools == nil {
		return nil, fmt.Errorf("pools: %w", run.ErrNotFound)
	}
	return s.deps.Pools, nil
}

// listPools answers GET /v1/pools.
func (s *Server) listPools(ctx context.Context, c *fiber.Ctx, _ run.Key) error {
	store, err := s.pools()
	if err != nil {
		return err
	}
	all, err := store.List(ctx)
	if err != nil {
		return err
	}
	return sendJSON(c, http.StatusOK, poolList{nonNil(all)})
}

// getPool answers GET /v1/pools/{name}.
func (s *Server) getPool(ctx context.Context, c *fiber.Ctx, _ run.Key) error {
	store, err := s.pools()
	if err != nil {
		return err
	}
	p, err := store.Get(ctx, c.Params("name"))
	if err != nil {
		return err
	}
	return sendJSON(c, http.StatusOK, p)
}

// setPool answers PUT /v1/pools/{name}: the policy in the body replaces the one before as a whole, on every node at once.
func (s *Server) setPool(ctx context.Context, c *fiber.Ctx, _ run.Key) error {
	store, err := s.pools()
	if err != nil {
		return err
	}
	var p pools.Policy
	replaces := int64(-1)
	err = s.readFields(ctx, c, func(d *decoder, name string) error { return policyMember(d, name, &p, &replaces) }, func(v *violations) {
		for _, wrong := range p.Problems() {
			v.invalid(wrong.Member, "%s", wrong.Detail)
		}
	})
	if err != nil {
		return err
	}
	name := c.Params("name")
	if _, err := store.Set(ctx, name, p, replaces); errors.Is(err, run.ErrState) {
		return problem(CodeConflict, "The policy was changed meanwhile.", FieldError{"revision", "is not that of the policy"})
	} else if err != nil {
		return err
	}
	changed, err := store.Get(ctx, name)
	if err != nil {
		return err
	}
	return sendJSON(c, http.StatusOK, changed)
}

// policyMember reads one member of a policy.
func policyMember(d *decoder, name string, p *pools.Policy, replaces *int64) error {
	whole := func(into **int) error {
		var n int64
		err := d.integer(name, &n)
		v := int(n)
		*into = &v
		return err
	}
	real := func(into **float64) error {
		var v float64
		err := d.number(name, &v)
		*into = &v
		return err
	}
	switch name {
	case "min_ready":
		return whole(&p.MinReady)
	case "max_ready":
		return whole(&p.MaxReady)
	case "max_machines":
		return whole(&p.MaxMachines)
	case "refill_concurrency":
		return whole(&p.RefillConcurrency)
	case "max_age_seconds":
		return real(&p.MaxAgeSeconds)
	case "target_miss_rate":
		return real(&p.TargetMissRate)
	case "drained":
		return d.flag(name, &p.Drained)
	case "drained_nodes":
		return d.array(name, maxDrained, func(d *decoder, path string) error {
			var node string
			err := d.text(path, &node)
			p.DrainedNodes = append(p.DrainedNodes, node)
			return err
		})
	case "revision":
		return d.integer(name, replaces)
	}
	return errUnknownField
}
