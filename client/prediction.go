package client

import (
	"context"
	"net/http"

	"github.com/ephemeral-run/ephemeral/run/pools"
)

// What a prediction is asked for, and what it gives.
type (
	Sizing     = pools.Sizing
	Prediction = pools.Prediction
)

// PredictPool simulates a pool of another size with its own policy. It changes nothing.
func (c *Client) PredictPool(ctx context.Context, name string, s Sizing) (Prediction, error) {
	body, err := encode(s)
	if err != nil {
		return Prediction{}, err
	}
	var p Prediction
	err = c.call(ctx, request{method: http.MethodPost, path: poolPath(name) + "/prediction", body: body, repeat: true}, &p)
	return p, err
}
