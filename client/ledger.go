package client

import (
	"context"
	"fmt"
	"iter"
	"net/http"
	"net/url"
	"strconv"

	"github.com/ephemeral-run/ephemeral/run"
)

// Statement yields the entries of the own organisation's ledger that come after the given number, 0 for all, oldest first.
// The last pair may have an error.
func (c *Client) Statement(ctx context.Context, after int64) iter.Seq2[run.Entry, error] {
	return c.statement(ctx, "/v1/account/statement", after)
}

// OrgStatement is Statement of any organisation; it needs an admin key.
func (c *Client) OrgStatement(ctx context.Context, org string, after int64) iter.Seq2[run.Entry, error] {
	return c.statement(ctx, orgPath(org, "/statement"), after)
}

func (c *Client) statement(ctx context.Context, path string, after int64) iter.Seq2[run.Entry, error] {
	return func(yield func(run.Entry, error) bool) {
		for {
			var page struct {
				Entries   []run.Entry `json:"entries"`
				NextAfter int64       `json:"next_after"`
			}
			err := c.call(ctx, request{method: http.MethodGet, path: path, query: url.Values{"after": {strconv.FormatInt(after, 10)}}, repeat: true}, &page)
			if err != nil {
				yield(run.Entry{}, fmt.Errorf("statement after entry %d: %w", after, err))
				return
			}
			for _, e := range page.Entries {
				if !yield(e, nil) {
					return
				}
			}
			if page.NextAfter <= after {
				return
			}
			after = page.NextAfter
		}
	}
}

// OwnLimits are those that hold for the client's key: its organisation's and its own.
type OwnLimits struct {
	Org run.Limits `json:"org"`
	Key run.Limits `json:"key"`
}

// Limits returns what the client's key may do at once.
func (c *Client) Limits(ctx context.Context) (l OwnLimits, err error) {
	err = c.call(ctx, request{method: http.MethodGet, path: "/v1/account/limits", repeat: true}, &l)
	return l, err
}

// OrgLimits returns an organisation's limits. It needs an admin key, as do the calls that follow.
func (c *Client) OrgLimits(ctx context.Context, org string) (run.Limits, error) {
	return c.limits(ctx, http.MethodGet, orgPath(org, "/limits"), nil)
}

// LimitOrg sets an organisation's limits, both of them; 0 is the server's default.
func (c *Client) LimitOrg(ctx context.Context, org string, l run.Limits) (run.Limits, error) {
	return c.limits(ctx, http.MethodPut, orgPath(org, "/limits"), &l)
}

// KeyLimits returns a member key's limits.
func (c *Client) KeyLimits(ctx context.Context, id string) (run.Limits, error) {
	return c.limits(ctx, http.MethodGet, "/v1/keys/"+url.PathEscape(id)+"/limits", nil)
}

// LimitKey sets a member key's limits, both of them; 0 is none beside its organisation's.
func (c *Client) LimitKey(ctx context.Context, id string, l run.Limits) (run.Limits, error) {
	return c.limits(ctx, http.MethodPut, "/v1/keys/"+url.PathEscape(id)+"/limits", &l)
}

func (c *Client) limits(ctx context.Context, method, path string, set *run.Limits) (l run.Limits, err error) {
	r := request{method: method, path: path, repeat: true}
	if set != nil {
		if r.body, err = encode(*set); err != nil {
			return run.Limits{}, err
		}
	}
	err = c.call(ctx, r, &l)
	return l, err
}
