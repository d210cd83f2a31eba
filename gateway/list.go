package gateway

import (
	"context"
	"errors"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gofiber/fiber/v2"

	"github.com/ephemeral-run/ephemeral/run"
)

// runList is the body of GET /v1/runs.
type runList struct {
	Runs       []run.Run `json:"runs"`
	NextCursor string    `json:"next_cursor,omitempty"` // absent on the last page
}

// listRuns answers GET /v1/runs.
func (s *Server) listRuns(ctx context.Context, c *fiber.Ctx, key run.Key) error {
	page, err := pageOf(c)
	if err != nil {
		return err
	}
	runs, next, err := s.deps.Store.List(ctx, key.Org, page)
	if errors.Is(err, run.ErrRange) {
		return problem(CodeInvalidParameter, "", FieldError{"cursor", "is not a cursor of this list"})
	}
	if err != nil {
		return err
	}
	if next != "" {
		c.Set(fiber.HeaderLink, nextLink(c, next))
	}
	return sendJSON(c, http.StatusOK, runList{Runs: nonNil(runs), NextCursor: next})
}

// nextLink is the address of the next page (RFC 8288): that of this one with another cursor.
func nextLink(c *fiber.Ctx, cursor string) string {
	q, _ := parameters(c) // refused before, had they been wrong
	q.Set("cursor", cursor)
	return "<" + c.Path() + "?" + q.Encode() + `>; rel="next"`
}

// maxCursor bounds a cursor, which is opaque here.
const maxCursor = 256

// pageOf reads the parameters of a list.
func pageOf(c *fiber.Ctx) (run.Page, error) {
	if err := onlyParameters(c, "cursor", "limit", "state", "queued_from", "queued_to", "metadata[]"); err != nil {
		return run.Page{}, err
	}
	q, err := parameters(c)
	if err != nil {
		return run.Page{}, err
	}
	var v violations
	p := run.Page{Cursor: q.Get("cursor"), State: run.State(q.Get("state")), Metadata: v.metadataFilter(q)}
	if len(p.Cursor) > maxCursor || hasControl(p.Cursor) {
		v.add(CodeInvalidParameter, "cursor", "is not a cursor of this list")
	}
	if q.Has("limit") {
		n, err := strconv.Atoi(q.Get("limit"))
		if err != nil || n < 1 || n > 100 {
			v.add(CodeInvalidParameter, "limit", "must be between 1 and 100")
		}
		p.Limit = n
	}
	if q.Has("state") && !slices.ContainsFunc(run.States, func(i run.StateInfo) bool { return i.State == p.State }) {
		v.add(CodeInvalidParameter, "state", "is not a state of a run")
	}
	p.QueuedFrom, p.QueuedTo = v.timeParameter(q, "queued_from"), v.timeParameter(q, "queued_to")
	if bad := v.problem(); bad != nil {
		return run.Page{}, bad
	}
	return p, nil
}

// metadataFilter reads the parameters metadata[key]=value.
func (v *violations) metadataFilter(q url.Values) map[string]string {
	var m map[string]string
	for name, values := range q {
		key, ok := bracketed(name, "metadata")
		if !ok {
			continue
		}
		if key == "" || len(key) > maxMetadataKey || len(values[0]) > maxMetadataValue {
			v.add(CodeInvalidParameter, shorten(name), "cannot be metadata of a run")
		}
		if m == nil {
			m = map[string]string{}
		}
		m[key] = values[0]
	}
	if len(m) > maxMetadata {
		v.add(CodeInvalidParameter, "metadata", "has too many entries")
	}
	return m
}

// bracketed reads the key of a parameter prefix[key].
func bracketed(name, prefix string) (key string, ok bool) {
	key, ok = strings.CutPrefix(name, prefix+"[")
	if !ok {
		return "", false
	}
	return strings.CutSuffix(key, "]")
}

// timeParameter reads a time (RFC 3339); zero if it is not given.
func (v *violations) timeParameter(q url.Values, name string) time.Time {
	if !q.Has(name) {
		return time.Time{}
	}
	t, err := time.Parse(time.RFC3339Nano, q.Get(name))
	if err != nil || t.Year() < 1970 || t.Year() > 9998 {
		v.add(CodeInvalidParameter, name, "must be a time like 2026-10-07T12:00:00Z")
	}
	return t
}

// parameters are the query's parameters.
func parameters(c *fiber.Ctx) (url.Values, error) {
	q, err := url.ParseQuery(string(c.Request().URI().QueryString()))
	if err != nil {
		return nil, problem(CodeInvalidParameter, "The query of the address is malformed.")
	}
	return q, nil
}

// onlyParameters refuses query parameters that nobody would look at, and those given twice: a misspelt filter must not mean
// "all". A known name with [] at its end stands for name[key] with any key.
func onlyParameters(c *fiber.Ctx, known ...string) error {
	q, err := parameters(c)
	if err != nil {
		return err
	}
	var fields []FieldError
	for name, values := range q {
		is := func(k string) bool {
			if prefix, open := strings.CutSuffix(k, "[]"); open {
				_, ok := bracketed(name, prefix)
				return ok
			}
			return k == name
		}
		switch {
		case !slices.ContainsFunc(known, is):
			fields = append(fields, FieldError{shorten(name), "is not a known parameter"})
		case len(values) > 1:
			fields = append(fields, FieldError{shorten(name), "is there more than once"})
		}
	}
	if len(fields) > 0 {
		return problem(CodeInvalidParameter, "", fields...)
	}
	return nil
}
