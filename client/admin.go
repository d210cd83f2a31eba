package client

import (
	"context"
	"net/http"
	"net/url"
	"time"

	"github.com/ephemeral-run/ephemeral/run"
)

// The calls of this file need an admin key.

func orgPath(id, rest string) string { return "/v1/orgs/" + url.PathEscape(id) + rest }

// CreateOrg makes an organisation; o.ID empty: the server chooses. With an ID the call may be repeated.
func (c *Client) CreateOrg(ctx context.Context, o run.Org) (run.Org, error) {
	body, err := encode(struct {
		ID          string `json:"id,omitempty"`
		Name        string `json:"name"`
		Concurrency int    `json:"concurrency,omitempty"`
	}{o.ID, o.Name, o.Concurrency})
	if err != nil {
		return run.Org{}, err
	}
	var made run.Org
	err = c.call(ctx, request{method: http.MethodPost, path: "/v1/orgs", body: body, repeat: o.ID != ""}, &made)
	return made, err
}

// Orgs returns all organisations.
func (c *Client) Orgs(ctx context.Context) ([]run.Org, error) {
	var l struct {
		Orgs []run.Org `json:"orgs"`
	}
	err := c.call(ctx, request{method: http.MethodGet, path: "/v1/orgs", repeat: true}, &l)
	return l.Orgs, err
}

// Org returns an organisation.
func (c *Client) Org(ctx context.Context, id string) (run.Org, error) {
	var o run.Org
	err := c.call(ctx, request{method: http.MethodGet, path: orgPath(id, ""), repeat: true}, &o)
	return o, err
}

// Credit adds amount to the organisation's account; a negative amount is a correction. ref, 1 to 200 visible ASCII
// characters, names the entry: the same ref and amount again changes nothing.
func (c *Client) Credit(ctx context.Context, org string, amount run.Micros, ref string) (run.Account, error) {
	body, err := encode(struct {
		Amount run.Micros `json:"amount_micros"`
		Ref    string     `json:"ref"`
	}{amount, ref})
	if err != nil {
		return run.Account{}, err
	}
	var a run.Account
	err = c.call(ctx, request{method: http.MethodPost, path: orgPath(org, "/credits"), body: body, repeat: true}, &a)
	return a, err
}

// OrgAccount returns an organisation's account.
func (c *Client) OrgAccount(ctx context.Context, org string) (run.Account, error) {
	var a run.Account
	err := c.call(ctx, request{method: http.MethodGet, path: orgPath(org, "/account"), repeat: true}, &a)
	return a, err
}

// NewKey is an API key with its secret, which is shown this once.
type NewKey struct {
	run.Key
	Secret string `json:"secret"`
}

// CreateKey makes a member key of the organisation. It is sent once: repeated, it would make a second key.
func (c *Client) CreateKey(ctx context.Context, org, name string, options ...run.KeyOption) (NewKey, error) {
	var want run.Key
	for _, o := range options {
		o(&want)
	}
	body, err := encode(struct {
		Name      string    `json:"name"`
		Member    string    `json:"member,omitempty"`
		ExpiresAt time.Time `json:"expires_at,omitzero"`
	}{name, want.Member, want.ExpiresAt})
	if err != nil {
		return NewKey{}, err
	}
	var k NewKey
	err = c.call(ctx, request{method: http.MethodPost, path: orgPath(org, "/keys"), body: body}, &k)
	return k, err
}

// Keys returns the organisation's keys, revoked ones too.
func (c *Client) Keys(ctx context.Context, org string) ([]run.Key, error) {
	var l struct {
		Keys []run.Key `json:"keys"`
	}
	err := c.call(ctx, request{method: http.MethodGet, path: orgPath(org, "/keys"), repeat: true}, &l)
	return l.Keys, err
}

// OrgUsage is Usage of any organisation.
func (c *Client) OrgUsage(ctx context.Context, org string, first, last time.Time) ([]run.DayUsage, error) {
	return c.usage(ctx, orgPath(org, "/usage"), first, last)
}

// AddMember adds a member to the organisation. It is sent once: repeated, it would add a second one.
func (c *Client) AddMember(ctx context.Context, org, name string) (run.OrgMember, error) {
	body, err := encode(struct {
		Name string `json:"name"`
	}{name})
	if err != nil {
		return run.OrgMember{}, err
	}
	var m run.OrgMember
	err = c.call(ctx, request{method: http.MethodPost, path: orgPath(org, "/members"), body: body}, &m)
	return m, err
}

// Members returns the organisation's members.
func (c *Client) Members(ctx context.Context, org string) ([]run.OrgMember, error) {
	var l struct {
		Members []run.OrgMember `json:"members"`
	}
	err := c.call(ctx, request{method: http.MethodGet, path: orgPath(org, "/members"), repeat: true}, &l)
	return l.Members, err
}

// RemoveMember removes a member and revokes its keys.
func (c *Client) RemoveMember(ctx context.Context, org, id string) error {
	return c.call(ctx, request{method: http.MethodDelete, path: orgPath(org, "/members/"+url.PathEscape(id)), repeat: true}, nil)
}

// Nodes returns the hosts that carry out runs.
func (c *Client) Nodes(ctx context.Context) ([]run.Node, error) {
	var l struct {
		Nodes []run.Node `json:"nodes"`
	}
	err := c.call(ctx, request{method: http.MethodGet, path: "/v1/nodes", repeat: true}, &l)
	return l.Nodes, err
}

// RevokeKey makes a key useless.
func (c *Client) RevokeKey(ctx context.Context, id string) error {
	return c.call(ctx, request{method: http.MethodDelete, path: "/v1/keys/" + url.PathEscape(id), repeat: true}, nil)
}

// Queues returns the organisations that have runs waiting or at work, the longest queues first, and how many there are: the
// server lists at most 100.
func (c *Client) Queues(ctx context.Context) ([]run.OrgQueue, int, error) {
	var l struct {
		Queues []run.OrgQueue `json:"queues"`
		Total  int            `json:"total"`
	}
	err := c.call(ctx, request{method: http.MethodGet, path: "/v1/queues", repeat: true}, &l)
	return l.Queues, l.Total, err
}
