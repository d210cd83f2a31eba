package gateway

import (
	"context"
	"errors"
	"net/http"
	"time"

	"github.com/gofiber/fiber/v2"

	"github.com/ephemeral-run/ephemeral/run"
)

// defaultShare is how long a share lives whose maker does not say.
const defaultShare = 24 * time.Hour

// newShare is the body of POST /v1/runs/{id}/shares's answer, the only one that has the token.
type newShare struct {
	run.Share
	Token string `json:"token"`
}

// shareList is the body of GET /v1/runs/{id}/shares.
type shareList struct {
	Shares []run.Share `json:"shares"`
}

// createShare answers POST /v1/runs/{id}/shares.
func (s *Server) createShare(ctx context.Context, c *fiber.Ctx, key run.Key) error {
	id, err := runID(c)
	if err != nil {
		return err
	}
	seconds := int64(defaultShare / time.Second)
	err = s.readFields(ctx, c, func(d *decoder, name string) error {
		if name == "expires_in_seconds" {
			return d.integer(name, &seconds)
		}
		return errUnknownField
	}, func(v *violations) {
		v.number("expires_in_seconds", seconds, int64(run.MinShare/time.Second), int64(run.MaxShare/time.Second))
	})
	if err != nil {
		return err
	}
	share, token, err := s.deps.Store.CreateShare(ctx, key.Org, id, time.Duration(seconds)*time.Second)
	switch {
	case errors.Is(err, run.ErrState):
		return problem(CodeConflict, "A run with zero data retention cannot be shared.")
	case errors.Is(err, run.ErrQueueFull):
		return problem(CodeConflict, "The run has as many shares as it may: revoke one.")
	case err != nil:
		return err
	}
	return sendJSON(c, http.StatusCreated, newShare{share, token})
}

// listShares answers GET /v1/runs/{id}/shares.
func (s *Server) listShares(ctx context.Context, c *fiber.Ctx, key run.Key) error {
	id, err := runID(c)
	if err != nil {
		return err
	}
	shares, err := s.deps.Store.Shares(ctx, key.Org, id)
	if err != nil {
		return err
	}
	return sendJSON(c, http.StatusOK, shareList{Shares: nonNil(shares)})
}

// revokeShare answers DELETE /v1/runs/{id}/shares/{share}.
func (s *Server) revokeShare(ctx context.Context, c *fiber.Ctx, key run.Key) error {
	id, err := runID(c)
	if err != nil {
		return err
	}
	if err := s.deps.Store.RevokeShare(ctx, key.Org, id, c.Params("share")); err != nil {
		return err
	}
	return c.SendStatus(http.StatusNoContent)
}

// withShare authenticates a request by the token of a share and calls h with the run that it opens.
func (s *Server) withShare(h func(ctx context.Context, c *fiber.Ctx, org string, id run.ID) error) fiber.Handler {
	return func(c *fiber.Ctx) error {
		ctx := s.deadline()
		authorization := headerValues(c, fiber.HeaderAuthorization)
		k := callOf(c)
		k.secret = len(authorization) > 0
		token, ok := bearer(authorization)
		if !ok {
			return problem(CodeUnauthenticated, "")
		}
		org, id, err := s.deps.Store.Shared(ctx, token)
		if err != nil {
			return err
		}
		k.run = id
		k.valid = func(ctx context.Context) error {
			_, _, err := s.deps.Store.Shared(ctx, token)
			return err
		}
		return h(ctx, c, org, id)
	}
}

// getShared answers GET /v1/shared: the run without what concerns its organisation alone.
func (s *Server) getShared(ctx context.Context, c *fiber.Ctx, org string, id run.ID) error {
	record, err := s.deps.Store.Get(ctx, org, id)
	if err != nil {
		return err
	}
	return s.sendView(c, org, http.StatusOK, record, sharedView)
}

// sharedView is what those see of a run who have a link to it.
func sharedView(r run.Run) run.Run {
	r.Org, r.Node = "", ""
	if r.Request != nil {
		request := *r.Request
		request.Metadata, request.Files, request.Connections = nil, nil, nil
		r.Request = &request
	}
	return r
}

// getSharedEvents answers GET /v1/shared/events as GET /v1/runs/{id}/events does.
func (s *Server) getSharedEvents(ctx context.Context, c *fiber.Ctx, org string, id run.ID) error {
	return s.sendEvents(ctx, c, run.Key{Org: org}, id)
}
