package gateway

import (
	"fmt"

	"github.com/gofiber/fiber/v2"
	"github.com/segmentio/encoding/json"

	"github.com/ephemeral-run/ephemeral/run"
)

// sendRun answers with a run. Its encoder writes what encoding/json does, in half the time; it is for runs alone since it does
// not know omitzero.
func sendRun(c *fiber.Ctx, status int, r *run.Run) error {
	body, err := json.Append(make([]byte, 0, 1024), r, json.EscapeHTML|json.SortMapKeys)
	if err != nil {
		return fmt.Errorf("encode run: %w", err)
	}
	setHeader(c, fiber.HeaderContentType, fiber.MIMEApplicationJSON)
	return c.Status(status).Send(body)
}
