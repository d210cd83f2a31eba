package web

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptrace"
	"strings"
	"sync/atomic"
)

// Result is one hit of a search.
type Result struct {
	Title   string `json:"title"`
	URL     string `json:"url"`
	Snippet string `json:"snippet"`
}

// Found is what a search gave.
type Found struct {
	Results []Result
	Status  int   // of the endpoint's answer; 0 if there was none
	Bytes   int64 // received
}

// Search asks the search endpoint and returns at most count results. answered tells whether it began to answer, also when
// there is an error; f has then the status alone. The endpoint is the operator's: it may have a private address.
func (c *Client) Search(ctx context.Context, query string, count int) (f Found, answered bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, c.cfg.Timeout)
	defer cancel()
	var began atomic.Bool
	ctx = httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{GotFirstResponseByte: func() { began.Store(true) }})
	data, status, err := c.ask(ctx, query)
	if err != nil {
		return Found{Status: status}, began.Load(), c.failure(ctx, err)
	}
	var doc struct {
		Results []struct {
			Title   string `json:"title"`
			URL     string `json:"url"`
			Content string `json:"content"`
		} `json:"results"`
	}
	if json.Unmarshal(data, &doc) != nil {
		return Found{Status: status}, true, ErrUpstream
	}
	f = Found{Results: []Result{}, Status: status, Bytes: int64(len(data))}
	for _, r := range doc.Results {
		if len(f.Results) == count {
			break
		}
		if !strings.HasPrefix(r.URL, "http://") && !strings.HasPrefix(r.URL, "https://") || len(r.URL) > 2048 {
			continue
		}
		f.Results = append(f.Results, Result{Title: c.text(r.Title, maxTitle), URL: c.text(r.URL, 2048), Snippet: c.text(r.Content, maxSnippet)})
	}
	return f, true, nil
}

func (c *Client) ask(ctx context.Context, query string) (data []byte, status int, err error) {
	u := *c.endpoint
	q := u.Query()
	q.Set("q", query)
	q.Set("format", "json")
	u.RawQuery = q.Encode()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
	if err != nil {
		return nil, 0, fmt.Errorf("make request: %w", err)
	}
	req.Header.Set("User-Agent", "ephemeral")
	req.Header.Set("Accept", "application/json")
	if c.cfg.SearchAPIKey != "" {
		req.Header.Set("Authorization", "Bearer "+string(c.cfg.SearchAPIKey))
	}
	resp, err := c.search.RoundTrip(req) // redirects are not followed: they would take the key along
	if err != nil {
		return nil, 0, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return nil, resp.StatusCode, ErrUpstream
	}
	data, err = io.ReadAll(io.LimitReader(resp.Body, maxSearch+1))
	if err == nil && len(data) > maxSearch {
		err = ErrUpstream
	}
	return data, resp.StatusCode, err
}

// text is one text of a result: one line, bounded, without the key.
func (c *Client) text(s string, most int) string {
	s = string(c.scrubber.Scrub([]byte(strings.Join(strings.Fields(strings.ToValidUTF8(s, "")), " "))))
	if c.scrubber.Hidden([]byte(s)) {
		return ""
	}
	s, _ = clip(s, most)
	return s
}
