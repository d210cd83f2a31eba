package gateway

import (
	"context"
	"errors"
	"net/http"
	"time"

	"github.com/gofiber/fiber/v2"
)

// health is the body of /healthz and /readyz.
type health struct {
	Status string `json:"status"`
}

// healthz answers that the process serves.
func (s *Server) healthz(c *fiber.Ctx) error { return sendJSON(c, http.StatusOK, health{"ok"}) }

// readyz answers whether requests should be sent here. The public answer names the part that is not ready; why it is
// not stands in the log and on the admin listener only. A reason that knows when it will be over (RetryAfter) is asked.
func (s *Server) readyz(verbose bool) fiber.Handler {
	return func(c *fiber.Ctx) error {
		ctx := s.deadline()
		part, err := s.notReady(ctx)
		if part == "" {
			return sendJSON(c, http.StatusOK, health{"ready"})
		}
		detail := "Not ready: " + part + "."
		if verbose && err != nil {
			detail = "Not ready: " + part + ": " + err.Error()
		}
		p := problem(CodeNotReady, detail).because(err)
		var known interface{ RetryAfter() time.Duration }
		if errors.As(err, &known) {
			p = p.after(known.RetryAfter())
		}
		return p
	}
}

// notReady names the first part that does not work; "" when all do.
func (s *Server) notReady(ctx context.Context) (part string, err error) {
	if s.draining.Load() {
		return "the server is going away", nil
	}
	if err := s.deps.Store.Ping(ctx); err != nil {
		return "the store does not answer", err
	}
	if s.deps.Ready == nil {
		return "", nil
	}
	if err := s.deps.Ready(); err != nil {
		return "runs cannot be started", err
	}
	return "", nil
}
