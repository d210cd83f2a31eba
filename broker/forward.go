package broker

import (
	"bytes"
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

	"github.com/ephemeral-run/ephemeral/broker/outbound"
	"github.com/ephemeral-run/ephemeral/run"
	"github.com/ephemeral-run/ephemeral/run/connection"
)

const (
	maxRedirects = 5
	maxQuery     = 8 << 10
)

// harmlessRequest and harmlessResponse are the headers that are passed on without being allowed by name.
var (
	harmlessRequest  = []string{"Accept", "Accept-Language", "Content-Type", "If-Match", "If-None-Match", "If-Modified-Since", "Range"}
	harmlessResponse = []string{"Content-Type", "Content-Language", "Content-Range", "Etag", "Last-Modified", "Link", "Retry-After"}
)

// forwarded is one request on its way to a connection's upstream.
type forwarded struct {
	h      *Handler
	c      *opened
	base   *url.URL
	url    *url.URL
	method string
	header http.Header
	body   []byte
	// answered is set once the upstream sent anything of an answer.
	answered atomic.Bool
	status   int // of the last answer
}

// answer is what an upstream sent, within the limits.
type answer struct {
	status int
	header http.Header
	body   []byte
}

// forward serves one request to an HTTP connection.
func (h *Handler) forward(w http.ResponseWriter, r *http.Request, c *opened, path string) error {
	f := &forwarded{h: h, c: c, method: r.Method, header: http.Header{}}
	p, err := f.aim(path, r.URL)
	if err != nil {
		return err
	}
	if f.body, err = readBody(w, r, c.MaxRequestBytes, h.b.bodyTimeout); err != nil {
		return err
	}
	f.copyHeaders(r.Header)
	ctx, cancel := h.during(r.Context(), c.Timeout())
	defer cancel()
	o, err := h.outward(ctx, run.EventConnection, run.CallData{Kind: string(c.Kind), Target: c.Name + p.String(), Method: f.method}, h.b.prices.Calls.Connection)
	if err != nil {
		return err
	}
	got, err := f.perform(ctx)
	if err != nil {
		bad := f.failed(ctx, err)
		o.done(f.answered.Load(), bad.upstream, 0, bad.message)
		return bad
	}
	o.done(true, got.status, int64(len(got.body)), "")
	f.reply(w, got)
	return nil
}

// aim finds the URL of the request and checks that the connection allows it.
func (f *forwarded) aim(path string, asked *url.URL) (connection.Path, error) {
	c := f.c
	if !c.AllowsMethod(f.method) {
		return nil, &problem{status: http.StatusForbidden, code: codeNotHere, message: "the connection allows " + strings.Join(c.Methods, ", ")}
	}
	p, err := connection.ParsePath(path)
	if err != nil {
		return nil, &problem{status: http.StatusForbidden, code: codePath, message: err.Error()}
	}
	if !c.AllowsPath(p) {
		return nil, &problem{status: http.StatusForbidden, code: codePath, message: "the connection allows " + strings.Join(c.Paths, ", ")}
	}
	if f.base, err = c.Base(); err != nil {
		return nil, fmt.Errorf("connection %s: %w", c.Name, err)
	}
	f.url = p.Below(f.base)
	if f.url.RawQuery, err = f.query(asked.RawQuery); err != nil {
		return nil, err
	}
	return p, nil
}

// query is the guest's query, when there is one way to read it and it does not touch the credential's parameter.
func (f *forwarded) query(raw string) (string, error) {
	values, err := url.ParseQuery(raw)
	if err != nil || len(raw) > maxQuery {
		return "", invalid("query", "the query makes no sense or has more than %d bytes", maxQuery)
	}
	if f.c.Auth.Type == connection.AuthQuery {
		for name := range values {
			if strings.EqualFold(name, f.c.Auth.Name) {
				return "", invalid("query", "the parameter %s is the broker's", f.c.Auth.Name)
			}
		}
	}
	return values.Encode(), nil
}

// copyHeaders takes from the guest's headers what goes along. Of the header that carries the credential nothing does.
func (f *forwarded) copyHeaders(from http.Header) {
	for _, names := range [][]string{harmlessRequest, f.c.RequestHeaders} {
		for _, n := range names {
			if v := from.Values(n); len(v) > 0 && n != f.c.AuthHeader() {
				f.header[n] = v
			}
		}
	}
	f.header.Set("User-Agent", "ephemeral")
}

// What an upstream can do wrong.
var (
	errRedirect = errors.New("the upstream redirects to where the connection must not go")
	errTooLarge = errors.New("the upstream's answer has more bytes than the connection allows")
	errReveals  = errors.New("the upstream's answer shows the credential")
	errEncoded  = errors.New("the upstream's answer is encoded in a way that cannot be looked into")
)

// perform makes the call, and follows redirects of GET and HEAD inside the connection's host and paths.
func (f *forwarded) perform(ctx context.Context) (*answer, error) {
	ctx = httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{GotFirstResponseByte: func() { f.answered.Store(true) }})
	for n := 0; ; n++ {
		got, err := f.once(ctx)
		if err != nil {
			return nil, err
		}
		next, err := f.redirect(got)
		if err != nil || next == nil {
			return got, err
		}
		if f.method != http.MethodGet && f.method != http.MethodHead {
			return got, nil // the guest sees where to
		}
		if n == maxRedirects {
			return nil, errRedirect
		}
		f.url = next
	}
}

// redirect is where an answer redirects to; nil: it does not. The error is errRedirect when that is outside.
func (f *forwarded) redirect(a *answer) (*url.URL, error) {
	switch a.status {
	case http.StatusMovedPermanently, http.StatusFound, http.StatusSeeOther, http.StatusTemporaryRedirect, http.StatusPermanentRedirect:
	default:
		return nil, nil
	}
	location := a.header.Get("Location")
	if location == "" {
		return nil, nil
	}
	to, err := f.url.Parse(location)
	if err != nil {
		return nil, errRedirect
	}
	if _, ok := f.inside(to); !ok {
		return nil, errRedirect
	}
	if f.c.Auth.Type == connection.AuthQuery {
		q := to.Query()
		q.Del(f.c.Auth.Name)
		to.RawQuery = q.Encode()
	}
	to.Fragment, to.RawFragment = "", ""
	return to, nil
}

// inside is a URL's path below the connection's base, when the connection covers it.
func (f *forwarded) inside(u *url.URL) (connection.Path, bool) {
	if u.Scheme != f.base.Scheme || !strings.EqualFold(u.Host, f.base.Host) || u.User != nil || u.Opaque != "" {
		return nil, false
	}
	below, ok := strings.CutPrefix(u.EscapedPath(), strings.TrimSuffix(f.base.EscapedPath(), "/"))
	if !ok {
		return nil, false
	}
	p, err := connection.ParsePath(below)
	if err != nil || !f.c.AllowsPath(p) {
		return nil, false
	}
	return p, true
}

// once makes one request, with the credential, and reads the answer within the limits.
func (f *forwarded) once(ctx context.Context) (*answer, error) {
	u := *f.url
	req, err := http.NewRequestWithContext(ctx, f.method, u.String(), bytes.NewReader(f.body))
	if err != nil {
		return nil, fmt.Errorf("make request: %w", err)
	}
	req.Header = f.header.Clone()
	f.authorise(req)
	resp, err := f.h.b.outbound.RoundTrip(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	f.answered.Store(true)
	if f.status = resp.StatusCode; f.status < 200 || f.status > 599 {
		return nil, errors.New("the upstream's status makes no sense")
	}
	if e := resp.Header.Get("Content-Encoding"); e != "" && !strings.EqualFold(e, "identity") && !resp.Uncompressed {
		return nil, errEncoded
	}
	body, err := io.ReadAll(io.LimitReader(resp.Body, f.c.MaxResponseBytes+1))
	if err != nil {
		return nil, fmt.Errorf("read answer: %w", err)
	}
	if int64(len(body)) > f.c.MaxResponseBytes {
		return nil, errTooLarge
	}
	return &answer{status: resp.StatusCode, header: resp.Header, body: body}, nil
}

// authorise adds the credential.
func (f *forwarded) authorise(req *http.Request) {
	credential := string(f.c.credential)
	switch f.c.Auth.Type {
	case connection.AuthBearer:
		req.Header.Set("Authorization", "Bearer "+credential)
	case connection.AuthBasic:
		req.SetBasicAuth(f.c.Auth.User, credential)
	case connection.AuthHeader:
		req.Header.Set(f.c.Auth.Name, credential)
	case connection.AuthQuery:
		q := req.URL.Query()
		q.Set(f.c.Auth.Name, credential)
		req.URL.RawQuery = q.Encode()
	}
}

// failed is the guest's answer to a call that failed. Causes are not for guests: they can show addresses and URLs.
func (f *forwarded) failed(ctx context.Context, err error) *problem {
	p := &problem{status: http.StatusBadGateway, code: codeUpstream, message: "the upstream could not be reached or broke off"}
	switch {
	case errors.Is(err, outbound.ErrAddress):
		p = &problem{status: http.StatusForbidden, code: codeAddress, message: "the connection's address must not be reached from here"}
	case errors.Is(err, errRedirect):
		p.code, p.message = codeRedirect, errRedirect.Error()
	case errors.Is(err, errTooLarge):
		p.code, p.message = codeResponseLarge, errTooLarge.Error()
	case errors.Is(err, errReveals), errors.Is(err, errEncoded):
		p.code, p.message = codeWithheld, err.Error()
	case errors.Is(err, context.DeadlineExceeded) || errors.Is(ctx.Err(), context.DeadlineExceeded):
		p = &problem{status: http.StatusGatewayTimeout, code: codeUpstreamSlow, message: "the upstream took too long"}
	case ctx.Err() != nil:
		p = &problem{status: errAbandoned.status, code: errAbandoned.code, message: errAbandoned.message}
	}
	p.upstream = f.status
	f.h.log.Warn("connection failed", "connection", f.c.Name, "reason", p.message)
	return p
}

// reply passes an answer on, without the credential. It withholds the answer when the credential is in it in a form that
// cannot be taken out.
func (f *forwarded) reply(w http.ResponseWriter, a *answer) {
	if f.c.scrubber.Hidden(a.body) {
		(&problem{status: http.StatusBadGateway, code: codeWithheld, message: errReveals.Error(), upstream: a.status}).write(w)
		f.h.refuse(codeWithheld)
		return
	}
	body := f.c.scrubber.Scrub(a.body)
	for _, names := range [][]string{harmlessResponse, f.c.ResponseHeaders} {
		for _, n := range names {
			for _, v := range a.header.Values(n) {
				if clean := f.c.scrubber.Scrub([]byte(v)); !f.c.scrubber.Hidden(clean) {
					w.Header().Add(n, string(clean))
				}
			}
		}
	}
	f.location(w, a)
	kind, _, _ := mime.ParseMediaType(a.header.Get("Content-Type"))
	if kind == "" {
		w.Header().Set("Content-Type", "application/octet-stream") // not guessed
	}
	w.Header().Set("Cache-Control", "no-store")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	if a.status != http.StatusNoContent && a.status != http.StatusNotModified && f.method != http.MethodHead {
		w.Header().Set("Content-Length", fmt.Sprint(len(body)))
	}
	// A connection without deadlines is still bounded by the run's own end.
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(writeTimeout))
	w.WriteHeader(a.status)
	_, _ = w.Write(body) // a guest that is gone needs no answer
}

// location tells the guest where an answer leads, as a path of the broker's.
func (f *forwarded) location(w http.ResponseWriter, a *answer) {
	to, err := f.url.Parse(a.header.Get("Location"))
	if a.header.Get("Location") == "" || err != nil {
		return
	}
	if p, ok := f.inside(to); ok {
		query := ""
		if to.RawQuery != "" && f.c.Auth.Type != connection.AuthQuery {
			query = "?" + to.RawQuery
		}
		location := []byte("/connections/" + f.c.Name + p.String() + query)
		if !f.c.scrubber.Found(location) && !f.c.scrubber.Hidden(location) {
			w.Header().Set("Location", string(location))
		}
	}
}
