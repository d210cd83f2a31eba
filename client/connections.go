package client

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"

	"github.com/ephemeral-run/ephemeral/run"
	"github.com/ephemeral-run/ephemeral/run/connection"
)

// ConnectionRequest is a connection as it is put. Name, HasCredential and the times of Connection are not sent.
type ConnectionRequest struct {
	connection.Connection
	// Credential nil keeps the one that is there.
	Credential *string
}

// body is what is sent.
func (r ConnectionRequest) body() map[string]any {
	body := map[string]any{"base_url": r.BaseURL, "auth": r.Auth}
	if r.Auth.Type == "" {
		delete(body, "auth")
	}
	for name, v := range map[string]string{"kind": string(r.Kind), "description": r.Description} {
		if v != "" {
			body[name] = v
		}
	}
	for name, v := range map[string][]string{"methods": r.Methods, "paths": r.Paths, "request_headers": r.RequestHeaders, "response_headers": r.ResponseHeaders} {
		if len(v) > 0 {
			body[name] = v
		}
	}
	for name, v := range map[string]int64{"max_request_bytes": r.MaxRequestBytes, "max_response_bytes": r.MaxResponseBytes, "max_rows": int64(r.MaxRows),
		"timeout_seconds": int64(r.TimeoutSeconds), "rate_per_minute": int64(r.RatePerMinute)} {
		if v != 0 {
			body[name] = v
		}
	}
	if r.Credential != nil {
		body["credential"] = *r.Credential
	}
	return body
}

func connectionPath(org, name string) string {
	return "/v1/orgs/" + url.PathEscape(org) + "/connections/" + url.PathEscape(name)
}

// PutConnection makes or replaces an organisation's connection. It needs an admin key, and may be repeated.
func (c *Client) PutConnection(ctx context.Context, org string, r ConnectionRequest) (connection.Connection, error) {
	var out connection.Connection
	body, err := json.Marshal(r.body())
	if err != nil {
		return out, fmt.Errorf("encode connection: %w", err)
	}
	err = c.call(ctx, request{method: http.MethodPut, path: connectionPath(org, r.Name), body: body, repeat: true}, &out)
	return out, err
}

// Connections lists an organisation's connections by name. It needs an admin key.
func (c *Client) Connections(ctx context.Context, org string) ([]connection.Connection, error) {
	var out struct {
		Connections []connection.Connection `json:"connections"`
	}
	err := c.call(ctx, request{method: http.MethodGet, path: "/v1/orgs/" + url.PathEscape(org) + "/connections", repeat: true}, &out)
	return out.Connections, err
}

// Connection returns an organisation's connection. It needs an admin key.
func (c *Client) Connection(ctx context.Context, org, name string) (connection.Connection, error) {
	var out connection.Connection
	err := c.call(ctx, request{method: http.MethodGet, path: connectionPath(org, name), repeat: true}, &out)
	return out, err
}

// DeleteConnection removes an organisation's connection and its credential. It needs an admin key.
func (c *Client) DeleteConnection(ctx context.Context, org, name string) error {
	return c.call(ctx, request{method: http.MethodDelete, path: connectionPath(org, name), repeat: true}, nil)
}

// ReceiptKeys lists the public keys that signed receipts.
func (c *Client) ReceiptKeys(ctx context.Context) ([]run.ReceiptKey, error) {
	var out struct {
		Keys []run.ReceiptKey `json:"keys"`
	}
	err := c.call(ctx, request{method: http.MethodGet, path: "/v1/receipt-keys", repeat: true}, &out)
	return out.Keys, err
}
