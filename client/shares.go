package client

import (
	"context"
	"iter"
	"net/http"
	"net/url"
	"time"

	"github.com/ephemeral-run/ephemeral/run"
)

// NewShare is a share with its token, which is shown this once.
type NewShare struct {
	run.Share
	Token string `json:"token"`
}

// CreateShare makes a token that lets whoever has it read the run, for so long: a minute to 30 days, 0 for a day. It is sent
// once: repeated, it would make a second share.
func (c *Client) CreateShare(ctx context.Context, id run.ID, life time.Duration) (NewShare, error) {
	body, err := encode(struct {
		Seconds int `json:"expires_in_seconds,omitempty"`
	}{int(life / time.Second)})
	if err != nil {
		return NewShare{}, err
	}
	var s NewShare
	err = c.call(ctx, request{method: http.MethodPost, path: runPath(id) + "/shares", body: body}, &s)
	return s, err
}

// Shares returns the run's shares that have not expired.
func (c *Client) Shares(ctx context.Context, id run.ID) ([]run.Share, error) {
	var l struct {
		Shares []run.Share `json:"shares"`
	}
	err := c.call(ctx, request{method: http.MethodGet, path: runPath(id) + "/shares", repeat: true}, &l)
	return l.Shares, err
}

// RevokeShare makes a share's token useless.
func (c *Client) RevokeShare(ctx context.Context, id run.ID, share string) error {
	return c.call(ctx, request{method: http.MethodDelete, path: runPath(id) + "/shares/" + url.PathEscape(share), repeat: true}, nil)
}

// Shared returns the run that a share opens; the client was made with the share's token as its key.
func (c *Client) Shared(ctx context.Context) (run.Run, error) {
	var r run.Run
	err := c.call(ctx, request{method: http.MethodGet, path: "/v1/shared", repeat: true}, &r)
	return r, err
}

// SharedEvents is Events for the run that a share opens.
func (c *Client) SharedEvents(ctx context.Context, after int64) iter.Seq2[run.Event, error] {
	return c.events(ctx, "/v1/shared/events", "the shared run", after)
}

// RetainOrg sets how long after a run's end the content of the organisation's runs is erased, in whole seconds; 0: with the
// record.
func (c *Client) RetainOrg(ctx context.Context, org string, d time.Duration) (run.Org, error) {
	body, err := encode(struct {
		Seconds int `json:"retention_seconds"`
	}{int(d / time.Second)})
	if err != nil {
		return run.Org{}, err
	}
	var o run.Org
	err = c.call(ctx, request{method: http.MethodPut, path: orgPath(org, "/retention"), body: body, repeat: true}, &o)
	return o, err
}
