package client

import (
	"context"
	"net/http"
	"net/url"

	"github.com/ephemeral-run/ephemeral/run/pools"
)

// The calls of this file need an admin key.

func poolPath(name string) string { return "/v1/pools/" + url.PathEscape(name) }

// Pools returns the pools of machines of the cell.
func (c *Client) Pools(ctx context.Context) ([]pools.Pool, error) {
	var l struct {
		Pools []pools.Pool `json:"pools"`
	}
	err := c.call(ctx, request{method: http.MethodGet, path: "/v1/pools", repeat: true}, &l)
	return l.Pools, err
}

// Pool returns one pool.
func (c *Client) Pool(ctx context.Context, name string) (pools.Pool, error) {
	var p pools.Pool
	err := c.call(ctx, request{method: http.MethodGet, path: poolPath(name), repeat: true}, &p)
	return p, err
}

// SetPool sets a pool's policy, in the place of the one before as a whole; every node follows at once. With replaces >= 0 it
// is set only in the place of one of that revision, else the server refuses with the code "conflict".
func (c *Client) SetPool(ctx context.Context, name string, p pools.Policy, replaces int64) (pools.Pool, error) {
	body := struct {
		pools.Policy
		Revision *int64 `json:"revision,omitempty"`
	}{Policy: p}
	if replaces >= 0 {
		body.Revision = &replaces
	}
	raw, err := encode(body)
	if err != nil {
		return pools.Pool{}, err
	}
	var set pools.Pool
	err = c.call(ctx, request{method: http.MethodPut, path: poolPath(name), body: raw, repeat: replaces < 0}, &set)
	return set, err
}
