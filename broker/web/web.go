// Package web fetches public pages as readable text, and searches the web through a SearXNG-compatible endpoint. What it
// fetches is untrusted and bounded in size and time; addresses that are not public are never reached.
package web

import (
	"context"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"net/http/httptrace"
	"net/url"
	"strings"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"golang.org/x/net/html/charset"

	"github.com/ephemeral-run/ephemeral/broker/outbound"
	"github.com/ephemeral-run/ephemeral/broker/secret"
)

// Config says what of the web runs may reach, and how.
type Config struct {
	Timeout      time.Duration `env:"EPHEMERAL_WEB_TIMEOUT" envDefault:"20s" help:"longest time of one web fetch or search, redirects included"`
	MaxBytes     int64         `env:"EPHEMERAL_WEB_MAX_BYTES" envDefault:"2097152" help:"bytes of a page that are read; the rest is cut off"`
	Ports        []uint16      `env:"EPHEMERAL_WEB_PORTS" envDefault:"80,443" help:"ports that pages may be fetched from"`
	Allow        []string      `env:"EPHEMERAL_WEB_ALLOW" help:"address ranges that may be fetched from although they are not public, e.g. 10.1.0.0/16"`
	SearchURL    string        `env:"EPHEMERAL_SEARCH_URL" help:"SearXNG-compatible search endpoint, e.g. http://127.0.0.1:8888/search (empty: runs cannot search)"`
	SearchAPIKey secret.Value  `env:"EPHEMERAL_SEARCH_API_KEY" secret:"true" help:"sent to the search endpoint as a bearer token"`
}

// WithDefaults fills in what a Config made by hand leaves out. The values are those of the envDefault tags.
func (c Config) WithDefaults() Config {
	if c.Timeout == 0 {
		c.Timeout = 20 * time.Second
	}
	if c.MaxBytes == 0 {
		c.MaxBytes = 2 << 20
	}
	if len(c.Ports) == 0 {
		c.Ports = []uint16{80, 443}
	}
	return c
}

// The bounds of what comes back.
const (
	maxText      = 256 << 10
	maxRedirects = 5
	maxSearch    = 1 << 20
	maxTitle     = 300
	maxSnippet   = 1000
)

// Client fetches and searches. It is safe for concurrent use. Close gives idle connections back.
type Client struct {
	cfg      Config
	policy   outbound.Policy
	pages    *http.Transport
	search   *http.Transport
	endpoint *url.URL
	scrubber *secret.Scrubber
}

// New checks the configuration and makes no connection.
func New(cfg Config) (*Client, error) {
	cfg = cfg.WithDefaults()
	if cfg.Timeout < 0 || cfg.MaxBytes < 0 {
		return nil, errors.New("web: timeout and size must be above zero")
	}
	allow, err := outbound.ParsePrefixes(cfg.Allow)
	if err != nil {
		return nil, fmt.Errorf("web: %w", err)
	}
	c := &Client{cfg: cfg, policy: outbound.Policy{Allow: allow, Ports: cfg.Ports}, scrubber: secret.NewScrubber(cfg.SearchAPIKey)}
	if cfg.SearchURL != "" {
		u, err := url.Parse(cfg.SearchURL)
		if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.User != nil || u.Fragment != "" {
			return nil, errors.New("web: the search endpoint must be http(s)://host[:port]/path")
		}
		c.endpoint = u
	}
	c.pages = (&outbound.Dialer{Policy: c.policy}).Transport()
	c.search = &http.Transport{MaxIdleConnsPerHost: 16, IdleConnTimeout: 60 * time.Second, TLSHandshakeTimeout: 10 * time.Second, MaxResponseHeaderBytes: 64 << 10}
	return c, nil
}

// Close gives idle connections back.
func (c *Client) Close() {
	if c != nil {
		c.pages.CloseIdleConnections()
		c.search.CloseIdleConnections()
	}
}

// CanSearch tells whether a search endpoint is configured.
func (c *Client) CanSearch() bool { return c != nil && c.endpoint != nil }

// Check reads a URL and returns outbound.ErrAddress, and why, when it cannot be a public page's.
func (c *Client) Check(rawURL string) (*url.URL, error) { return c.policy.ParseURL(rawURL) }

// Page is what a URL gave.
type Page struct {
	URL         string `json:"url"` // where redirects led
	Status      int    `json:"status"`
	ContentType string `json:"content_type"`
	Title       string `json:"title"`
	Text        string `json:"text"`
	Bytes       int64  `json:"bytes"` // received
	Truncated   bool   `json:"truncated"`
}

// What can go wrong beside outbound.ErrAddress. Texts are safe to show.
var (
	ErrUpstream = errors.New("the server could not be reached or broke off")
	ErrRedirect = errors.New("the server redirects too often")
	ErrTimeout  = errors.New("the server took too long")
)

// Fetch gets a URL. raw wants the body as it is, if it is text; otherwise HTML becomes readable text. answered tells whether
// a server began to answer, also when there is an error.
func (c *Client) Fetch(ctx context.Context, rawURL string, raw bool) (p *Page, answered bool, err error) {
	u, err := c.policy.ParseURL(rawURL)
	if err != nil {
		return nil, false, err
	}
	ctx, cancel := context.WithTimeout(ctx, c.cfg.Timeout)
	defer cancel()
	var began atomic.Bool
	ctx = httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{GotFirstResponseByte: func() { began.Store(true) }})
	resp, err := c.get(ctx, u)
	if err != nil {
		return nil, began.Load(), c.failure(ctx, err)
	}
	defer resp.Body.Close()
	p = &Page{URL: resp.Request.URL.String(), Status: resp.StatusCode}
	kind, _, err := mime.ParseMediaType(resp.Header.Get("Content-Type"))
	if err == nil {
		p.ContentType = kind
	}
	body, err := io.ReadAll(io.LimitReader(resp.Body, c.cfg.MaxBytes+1))
	if int64(len(body)) > c.cfg.MaxBytes {
		body, p.Truncated = body[:c.cfg.MaxBytes], true
	} else if err != nil {
		return nil, true, c.failure(ctx, err)
	}
	p.Bytes = int64(len(body))
	p.fill(body, resp.Header.Get("Content-Type"), resp.Request.URL, raw)
	return p, true, nil
}

// get follows redirects, each checked like the first URL.
func (c *Client) get(ctx context.Context, u *url.URL) (*http.Response, error) {
	client := http.Client{Transport: c.pages, CheckRedirect: func(req *http.Request, via []*http.Request) error {
		if len(via) > maxRedirects {
			return ErrRedirect
		}
		checked, err := c.policy.ParseURL(req.URL.String())
		if err != nil {
			return err
		}
		req.URL = checked
		req.Header.Del("Referer")
		return nil
	}}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
	if err != nil {
		return nil, fmt.Errorf("make request: %w", err)
	}
	req.Header.Set("User-Agent", "Mozilla/5.0 (compatible; ephemeral)")
	req.Header.Set("Accept", "text/html, text/plain;q=0.9, */*;q=0.5")
	return client.Do(req)
}

// failure is what a caller may know of an error: causes show addresses.
func (c *Client) failure(ctx context.Context, err error) error {
	switch {
	case errors.Is(err, outbound.ErrAddress):
		return fmt.Errorf("the URL leads to where it must not: %w", outbound.ErrAddress)
	case errors.Is(err, ErrRedirect):
		return ErrRedirect
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		return ErrTimeout
	case ctx.Err() != nil:
		return ctx.Err()
	}
	return ErrUpstream
}

// fill makes text of a body.
func (p *Page) fill(body []byte, contentType string, u *url.URL, raw bool) {
	if p.ContentType == "" {
		p.ContentType, _, _ = mime.ParseMediaType(http.DetectContentType(body))
	}
	if !textual(p.ContentType) {
		return
	}
	text := decode(body, contentType)
	if !raw && (p.ContentType == "text/html" || p.ContentType == "application/xhtml+xml") {
		p.Title, text = readable(text, u)
	}
	var cut bool
	p.Text, cut = clip(text, maxText)
	p.Title, _ = clip(strings.Join(strings.Fields(p.Title), " "), maxTitle)
	p.Truncated = p.Truncated || cut
}

func textual(kind string) bool {
	for _, suffix := range []string{"+json", "+xml", "/json", "/xml", "/javascript", "/x-ndjson", "/yaml", "/x-yaml", "/csv", "/toml"} {
		if strings.HasSuffix(kind, suffix) {
			return true
		}
	}
	return strings.HasPrefix(kind, "text/")
}

// decode makes UTF-8 of the character set that the server or the page names.
func decode(body []byte, contentType string) string {
	enc, _, _ := charset.DetermineEncoding(body, contentType)
	if utf8.Valid(body) {
		return string(body)
	}
	out, err := enc.NewDecoder().Bytes(body)
	if err != nil {
		out = body
	}
	return strings.ToValidUTF8(string(out), "\uFFFD")
}

// clip cuts a text at a character's border.
func clip(s string, most int) (string, bool) {
	if len(s) <= most {
		return s, false
	}
	for most > 0 && !utf8.RuneStart(s[most]) {
		most--
	}
	return s[:most], true
}
