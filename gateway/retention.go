package gateway

import (
	"context"
	"net/http"

	"github.com/gofiber/fiber/v2"

	"github.com/ephemeral-run/ephemeral/run"
)

// putOrgRetention answers PUT /v1/orgs/{id}/retention.
func (s *Server) putOrgRetention(ctx context.Context, c *fiber.Ctx, _ run.Key) error {
	org, err := s.org(ctx, c)
	if err != nil {
		return err
	}
	seconds, given := int64(0), false
	err = s.readFields(ctx, c, func(d *decoder, name string) error {
		if name == "retention_seconds" {
			given = true
			return d.integer(name, &seconds)
		}
		return errUnknownField
	}, func(v *violations) {
		if !given {
			v.invalid("retention_seconds", "is required")
		}
		v.number("retention_seconds", seconds, 0, maxRetention)
	})
	if err != nil {
		return err
	}
	if org, err = s.deps.Store.RetainOrg(ctx, org.ID, int(seconds)); err != nil {
		return err
	}
	return sendJSON(c, http.StatusOK, org)
}
