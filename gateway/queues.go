package gateway

import (
	"context"
	"net/http"

	"github.com/gofiber/fiber/v2"

	"github.com/ephemeral-run/ephemeral/run"
)

// maxQueues is how many organisations one answer lists.
const maxQueues = 100

// queueList are the queues of the cell, the longest first.
type queueList struct {
	Queues []run.OrgQueue `json:"queues"`
	Total  int            `json:"total"` // organisations with runs waiting or at work, those not listed included
}

// listQueues answers GET /v1/queues.
func (s *Server) listQueues(ctx context.Context, c *fiber.Ctx, _ run.Key) error {
	queues, total, err := s.deps.Store.Queues(ctx, maxQueues)
	if err != nil {
		return err
	}
	return sendJSON(c, http.StatusOK, queueList{nonNil(queues), total})
}
