package client

import (
	"context"
	"net/http"

	"github.com/ephemeral-run/ephemeral/run"
)

// AllowImages sets which images the organisation's runs may use, from the next one on; none: any.
func (c *Client) AllowImages(ctx context.Context, org string, names []string) (run.Org, error) {
	if names == nil {
		names = []string{}
	}
	body, err := encode(struct {
		Images []string `json:"images"`
	}{names})
	if err != nil {
		return run.Org{}, err
	}
	var o run.Org
	err = c.call(ctx, request{method: http.MethodPut, path: orgPath(org, "/images"), body: body, repeat: true}, &o)
	return o, err
}
