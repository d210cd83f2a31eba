// Package client is the Go client of the Ephemeral HTTP API: it creates runs exactly once, waits for them, follows
// their events through broken connections, and administers organisations, credit and keys.
package client

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"
)

// maxAnswer bounds how much of an answer is read. A run with its files and both output streams can have tens of
// mebibytes.
const maxAnswer = 256 << 20

// answerTimeout is how long one attempt of a call may take, beside the time that the server was asked to wait.
const answerTimeout = 60 * time.Second

// Client calls one server with one API key. It is safe for concurrent use.
type Client struct {
	base   *url.URL
	key    string
	http   *http.Client
	agent  string
	outage time.Duration
	delay  time.Duration // before the second attempt
}

// Option changes a client.
type Option func(*Client)

// WithTransport sets how requests are sent; nil is http.DefaultTransport.
func WithTransport(t http.RoundTripper) Option { return func(c *Client) { c.http.Transport = t } }

// WithUserAgent sets the User-Agent header.
func WithUserAgent(agent string) Option { return func(c *Client) { c.agent = agent } }

// WithMaxOutage sets for how long a call is repeated while the server cannot be reached or asks to come later; the
// default is one minute. Zero: every call is sent once.
func WithMaxOutage(d time.Duration) Option { return func(c *Client) { c.outage = d } }

// New makes a client of the server at baseURL, e.g. "https://ephemeral.example.com". apiKey is "eph_..."; it may be
// empty for Ready alone.
func New(baseURL, apiKey string, options ...Option) (*Client, error) {
	u, err := url.Parse(strings.TrimRight(baseURL, "/"))
	if err != nil {
		return nil, fmt.Errorf("server address: %w", err)
	}
	if (u.Scheme != "http" && u.Scheme != "https") || u.Host == "" || u.RawQuery != "" || u.User != nil {
		return nil, fmt.Errorf("server address %q: want http://host or https://host", u.Redacted())
	}
	if strings.ContainsFunc(apiKey, func(r rune) bool { return r <= ' ' || r > '~' }) {
		return nil, errors.New("the API key has characters that no key has")
	}
	c := &Client{
		base: u, key: apiKey, agent: "ephemeral-go", outage: time.Minute, delay: minDelay,
		// A redirect would carry the key to another place.
		http: &http.Client{CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }},
	}
	for _, o := range options {
		o(c)
	}
	return c, nil
}

// Ready returns nil when the server is ready for requests.
func (c *Client) Ready(ctx context.Context) error {
	return c.call(ctx, request{method: http.MethodGet, path: "/readyz"}, nil)
}

// request is one call, which may be sent several times.
type request struct {
	method, path string
	query        url.Values
	header       map[string]string
	body         []byte
	wait         time.Duration // how long the server was asked to wait
	repeat       bool          // sending it again does no harm
}

// newRequest makes what is sent in one attempt.
func (c *Client) newRequest(ctx context.Context, r request) (*http.Request, error) {
	u := c.base.JoinPath(r.path)
	u.RawQuery = r.query.Encode()
	var body io.Reader
	if r.body != nil {
		body = bytes.NewReader(r.body)
	}
	req, err := http.NewRequestWithContext(ctx, r.method, u.String(), body)
	if err != nil {
		return nil, fmt.Errorf("make request: %w", err)
	}
	if c.key != "" {
		req.Header.Set("Authorization", "Bearer "+c.key)
	}
	req.Header.Set("User-Agent", c.agent)
	req.Header.Set("Accept", "application/json")
	if r.body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	for name, value := range r.header {
		req.Header.Set(name, value)
	}
	return req, nil
}

// call sends the request, again as long as that may help, and decodes the answer into out unless that is nil.
func (c *Client) call(ctx context.Context, r request, out any) error {
	_, err := c.callHeader(ctx, r, out)
	return err
}

// callHeader is call for those who need the answer's header.
func (c *Client) callHeader(ctx context.Context, r request, out any) (http.Header, error) {
	b := c.newBackoff()
	for {
		header, err := c.attempt(ctx, r, out)
		if err == nil {
			return header, nil
		}
		err = fmt.Errorf("%s %s: %w", r.method, r.path, err)
		if !r.repeat || !temporary(err) {
			return nil, err
		}
		if !b.sleep(ctx, err) {
			if ctx.Err() != nil {
				err = fmt.Errorf("%w, after %w", context.Cause(ctx), err)
			}
			return nil, err
		}
	}
}

// attempt sends the request once.
func (c *Client) attempt(ctx context.Context, r request, out any) (http.Header, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, answerTimeout+r.wait, errNoAnswer)
	defer cancel()
	req, err := c.newRequest(ctx, r)
	if err != nil {
		return nil, err
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, noAnswer(ctx, err)
	}
	defer resp.Body.Close()
	if resp.StatusCode < 200 || resp.StatusCode > 299 {
		return nil, readProblem(resp)
	}
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer+1))
	if err != nil {
		return nil, noAnswer(ctx, fmt.Errorf("read answer: %w", err))
	}
	if len(body) > maxAnswer {
		return nil, fmt.Errorf("the answer has more than %d bytes", maxAnswer)
	}
	if out == nil {
		return resp.Header, nil
	}
	if err := json.Unmarshal(body, out); err != nil {
		return nil, fmt.Errorf("the answer is not of this API: %w", err)
	}
	return resp.Header, nil
}

// encode writes a request's body.
func encode(v any) ([]byte, error) {
	b, err := json.Marshal(v)
	if err != nil {
		return nil, fmt.Errorf("encode request: %w", err)
	}
	return b, nil
}
