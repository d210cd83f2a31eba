package guest

import (
	"context"

	"github.com/ephemeral-run/ephemeral/guestagent/proto"
)

// OpenDoor makes the broker reachable for the commands of the machine as http://broker.local. It is called once, after
// Prepare.
func (c *Client) OpenDoor(ctx context.Context) error {
	return c.do(ctx, "open door", func(k *call) error {
		k.guard.unary()
		_, err := k.agent.OpenDoor(ctx, &proto.OpenDoorRequest{})
		return err
	})
}

// Conclude makes the worker end now, with what was done so far as its final answer and the error code, which is
// budget_exhausted or time_limit.
func (c *Client) Conclude(ctx context.Context, code string) error {
	return c.do(ctx, "conclude", func(k *call) error {
		k.guard.unary()
		_, err := k.agent.Conclude(ctx, &proto.ConcludeRequest{ErrorCode: code})
		return err
	})
}
