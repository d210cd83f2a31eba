package gateway

import (
	"context"
	"errors"
	"net/http"
	"time"

	"github.com/gofiber/fiber/v2"

	"github.com/ephemeral-run/ephemeral/run"
)

// usageDays is how many days are shown where none are asked for.
const usageDays = 30

// usageList is the body of GET /v1/usage.
type usageList struct {
	Days []run.DayUsage `json:"days"`
}

// getUsage answers GET /v1/usage.
func (s *Server) getUsage(ctx context.Context, c *fiber.Ctx, key run.Key) error {
	return s.sendUsage(ctx, c, key.Org)
}

// getOrgUsage answers GET /v1/orgs/{id}/usage.
func (s *Server) getOrgUsage(ctx context.Context, c *fiber.Ctx, _ run.Key) error {
	org, err := s.org(ctx, c)
	if err != nil {
		return err
	}
	return s.sendUsage(ctx, c, org.ID)
}

// sendUsage answers with the usage of the days that the request asks for.
func (s *Server) sendUsage(ctx context.Context, c *fiber.Ctx, org string) error {
	if err := onlyParameters(c, "from", "to"); err != nil {
		return err
	}
	q, err := parameters(c)
	if err != nil {
		return err
	}
	var v violations
	day := func(name string, otherwise time.Time) time.Time {
		if !q.Has(name) {
			return otherwise
		}
		t, err := time.Parse(time.DateOnly, q.Get(name))
		if err != nil {
			v.add(CodeInvalidParameter, name, "must be a day like 2026-10-07")
		}
		return t
	}
	to := day("to", time.Now().UTC())
	from := day("from", to.AddDate(0, 0, 1-usageDays))
	if p := v.problem(); p != nil {
		return p
	}
	days, err := s.deps.Store.Usage(ctx, org, from, to)
	if errors.Is(err, run.ErrRange) {
		return problem(CodeInvalidParameter, "", FieldError{"from", "must be at most 365 days before to"})
	}
	if err != nil {
		return err
	}
	return sendJSON(c, http.StatusOK, usageList{days})
}
