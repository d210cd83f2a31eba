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
	body, release, err := s.readBody(ctx, c)
	if err != nil {
		return err
	}
	defer release()
	seconds, given := int64(0), false
	d, err := decodeObject(body, func(d *decoder, name string) error {
		if name == "retention_seconds" {
			given = true
			return d.integer(name, &seconds)
		}
		return errUnknownField
	})
	if err != nil {
		return err
	}
	v := violations{fields: d.fields}
	if !given {
		v.invalid("retention_seconds", "is required")
	}
	v.number("retention_seconds", seconds, 0, maxRetention)
	if p := v.problem(); p != nil {
		return p
	}
	if org, err = s.deps.Store.RetainOrg(ctx, org.ID, int(seconds)); err != nil {
		return err
	}
	return sendJSON(c, http.StatusOK, org)
}
