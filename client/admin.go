package client

import (
	"context"
	"net/http"
	"net/url"

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
func (c *Client) CreateKey(ctx context.Context, org, name string) (NewKey, error) {
	body, err := encode(struct {
		Name string `json:"name"`
	}{name})
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

// RevokeKey makes a key useless.
func (c *Client) RevokeKey(ctx context.Context, id string) error {
	return c.call(ctx, request{method: http.MethodDelete, path: "/v1/keys/" + url.PathEscape(id), repeat: true}, nil)
}
