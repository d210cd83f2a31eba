package broker

import (
	"errors"
	"net/http"
	"net/url"
	"strings"
	"unicode/utf8"

	"github.com/ephemeral-run/ephemeral/broker/outbound"
	"github.com/ephemeral-run/ephemeral/broker/web"
	"github.com/ephemeral-run/ephemeral/run"
)

// The bounds of a search.
const (
	maxSearchQuery = 1000
	maxResults     = 20
	defaultResults = 10
)

// webFetch serves POST /web/fetch.
func (h *Handler) webFetch(w http.ResponseWriter, r *http.Request) error {
	var req struct {
		URL    string `json:"url"`
		Format string `json:"format"`
	}
	if err := h.readJSON(w, r, &req); err != nil {
		return err
	}
	if req.Format != "" && req.Format != "text" && req.Format != "raw" {
		return invalid("format", "want text or raw")
	}
	if _, err := h.b.web.Check(req.URL); err != nil {
		return &problem{status: http.StatusForbidden, code: codeAddress, param: "url", message: err.Error()}
	}
	ctx, cancel := h.during(r.Context(), h.b.cfg.CallTimeout)
	defer cancel()
	o, err := h.outward(ctx, run.EventWeb, run.CallData{Kind: "fetch", Target: target(req.URL), Method: http.MethodGet}, h.b.prices.Calls.WebFetch)
	if err != nil {
		return err
	}
	page, answered, err := h.b.web.Fetch(ctx, req.URL, req.Format == "raw")
	if err != nil {
		p := webFailed(err)
		o.done(answered, 0, 0, p.code)
		return p
	}
	o.done(true, page.Status, page.Bytes, "")
	return writeJSON(w, page)
}

// target is a URL for an event: without what may be long or personal in its query.
func target(s string) string {
	u, err := url.Parse(s)
	if err != nil {
		return ""
	}
	u.RawQuery, u.Fragment = "", ""
	if s = u.String(); len(s) > 512 {
		s = strings.ToValidUTF8(s[:512], "")
	}
	return s
}

// webSearch serves POST /web/search.
func (h *Handler) webSearch(w http.ResponseWriter, r *http.Request) error {
	req := struct {
		Query string `json:"query"`
		Count int    `json:"count"`
	}{Count: defaultResults}
	if err := h.readJSON(w, r, &req); err != nil {
		return err
	}
	switch {
	case strings.TrimSpace(req.Query) == "" || len(req.Query) > maxSearchQuery || !utf8.ValidString(req.Query):
		return invalid("query", "want 1 to %d bytes of text", maxSearchQuery)
	case req.Count < 1 || req.Count > maxResults:
		return invalid("count", "want 1 to %d", maxResults)
	}
	ctx, cancel := h.during(r.Context(), h.b.cfg.CallTimeout)
	defer cancel()
	o, err := h.outward(ctx, run.EventWeb, run.CallData{Kind: "search", Target: req.Query, Method: http.MethodGet}, h.b.prices.Calls.WebSearch)
	if err != nil {
		return err
	}
	found, answered, err := h.b.web.Search(ctx, req.Query, req.Count)
	if err != nil {
		p := webFailed(err)
		p.upstream = found.Status
		o.done(answered, found.Status, 0, p.code)
		return p
	}
	o.done(true, found.Status, found.Bytes, "")
	return writeJSON(w, map[string]any{"query": req.Query, "results": found.Results})
}

func webFailed(err error) *problem {
	switch {
	case errors.Is(err, outbound.ErrAddress):
		return &problem{status: http.StatusForbidden, code: codeAddress, param: "url", message: err.Error()}
	case errors.Is(err, web.ErrTimeout):
		return &problem{status: http.StatusGatewayTimeout, code: codeUpstreamSlow, message: err.Error()}
	case errors.Is(err, web.ErrRedirect):
		return &problem{status: http.StatusBadGateway, code: codeRedirect, message: err.Error()}
	case errors.Is(err, web.ErrUpstream):
		return &problem{status: http.StatusBadGateway, code: codeUpstream, message: err.Error()}
	}
	return &problem{status: errAbandoned.status, code: errAbandoned.code, message: errAbandoned.message}
}
