package worker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"unicode/utf8"
)

// The kinds of connections.
const (
	kindHTTP     = "http"
	kindPostgres = "postgres"
)

// The bounds of what the broker tells of connections.
const (
	maxConnections = 64
	maxDescribed   = 512 // bytes of a connection's description
)

// connection is what the broker tells of one.
type connection struct {
	Name        string   `json:"name"`
	Kind        string   `json:"kind"`
	Description string   `json:"description"`
	Methods     []string `json:"methods"`
	Paths       []string `json:"paths"`
}

// line describes a connection to the model.
func (c connection) line() string {
	var b strings.Builder
	fmt.Fprintf(&b, "`%s`: ", c.Name)
	if c.Kind == kindPostgres {
		b.WriteString("a PostgreSQL database, for `sql_query`")
	} else {
		fmt.Fprintf(&b, "HTTP, for `connection_request`; methods %s", strings.Join(c.Methods, ", "))
		if len(c.Paths) > 0 {
			fmt.Fprintf(&b, "; paths %s", strings.Join(c.Paths, ", "))
		}
	}
	text := bound(b.String(), 2<<10)
	if c.Description != "" {
		text += ". " + bound(c.Description, maxDescribed)
	}
	return strings.Join(strings.Fields(clean(text)), " ")
}

// discover asks the broker what the run's connections are, and whether there is a search. What it does not tell is not
// offered to the model, which is told so.
func (w *worker) discover(ctx context.Context) permits {
	p := permits{shell: w.Shell, files: w.Shell || w.Files, web: w.Web, door: w.Door}
	if w.Web {
		// Another method than the route's: refused as such where there is a search, as unknown where there is none.
		r, err := w.broker.exchange(ctx, outward{method: http.MethodGet, path: "/web/search"})
		p.search = err == nil && r.status == http.StatusMethodNotAllowed
	}
	if len(w.Connections) > 0 {
		p.connections = w.known(ctx)
	}
	return p
}

func (w *worker) known(ctx context.Context) []connection {
	r, err := w.broker.exchange(ctx, outward{method: http.MethodGet, path: "/connections"})
	if err != nil || r.status != http.StatusOK {
		return nil
	}
	var list struct {
		Connections []connection `json:"connections"`
	}
	if json.Unmarshal(r.body, &list) != nil {
		return nil
	}
	known := slices.DeleteFunc(list.Connections, func(c connection) bool {
		return !slices.Contains(w.Connections, c.Name) || c.Kind != kindHTTP && c.Kind != kindPostgres
	})
	return known[:min(len(known), maxConnections)]
}

func (w *worker) webFetch(ctx context.Context, arguments []byte) string {
	var args struct {
		URL    string `json:"url"`
		Format string `json:"format"`
	}
	if err := parse(arguments, &args); err != nil {
		return failure(err)
	}
	if args.URL == "" {
		return failure(errors.New(`the arguments have no "url"`))
	}
	body := map[string]any{"url": args.URL}
	if args.Format != "" {
		body["format"] = args.Format
	}
	var page struct {
		URL       string `json:"url"`
		Status    int    `json:"status"`
		Type      string `json:"content_type"`
		Title     string `json:"title"`
		Text      string `json:"text"`
		Bytes     int64  `json:"bytes"`
		Truncated bool   `json:"truncated"`
	}
	if err := w.post(ctx, "/web/fetch", body, &page); err != nil {
		return w.refused("fetch "+args.URL, err)
	}
	w.record("fetch "+args.URL, fmt.Sprintf("status %d", page.Status))
	var b strings.Builder
	fmt.Fprintf(&b, "status %d, %s, %d bytes, %s\n", page.Status, orNone(page.Type), page.Bytes, page.URL)
	if page.Title != "" {
		fmt.Fprintf(&b, "title: %s\n", page.Title)
	}
	if page.Truncated {
		b.WriteString("(only the beginning was received)\n")
	}
	if page.Text == "" {
		b.WriteString("(no text)")
	}
	return bound(b.String(), 4<<10) + bound(page.Text, maxResult)
}

func orNone(kind string) string {
	if kind == "" {
		return "no content type"
	}
	return kind
}

func (w *worker) webSearch(ctx context.Context, arguments []byte) string {
	var args struct {
		Query string      `json:"query"`
		Count json.Number `json:"count"`
	}
	if err := parse(arguments, &args); err != nil {
		return failure(err)
	}
	n, err := count(args.Count, 10, 20)
	if err != nil || n == 0 || strings.TrimSpace(args.Query) == "" {
		return failure(errors.New(`want a "query", and a "count" of 1 to 20 if any`))
	}
	var found struct {
		Results []struct {
			Title   string `json:"title"`
			URL     string `json:"url"`
			Snippet string `json:"snippet"`
		} `json:"results"`
	}
	if err := w.post(ctx, "/web/search", map[string]any{"query": args.Query, "count": n}, &found); err != nil {
		return w.refused("search "+args.Query, err)
	}
	w.record("search "+args.Query, fmt.Sprintf("%d results", len(found.Results)))
	if len(found.Results) == 0 {
		return "no results"
	}
	var b strings.Builder
	for i, r := range found.Results {
		fmt.Fprintf(&b, "%d. %s\n   %s\n   %s\n", i+1, bound(r.Title, 512), bound(r.URL, 2<<10), bound(r.Snippet, 2<<10))
	}
	return bound(b.String(), maxResult)
}

func (w *worker) connectionRequest(ctx context.Context, arguments []byte) string {
	var args struct {
		Connection string            `json:"connection"`
		Method     string            `json:"method"`
		Path       string            `json:"path"`
		Headers    map[string]string `json:"headers"`
		Body       string            `json:"body"`
	}
	if err := parse(arguments, &args); err != nil {
		return failure(err)
	}
	if err := w.permits.check(args.Connection, kindHTTP); err != nil {
		return failure(err)
	}
	path, err := below(args.Connection, args.Path)
	if err != nil {
		return failure(err)
	}
	if args.Method == "" {
		args.Method = http.MethodGet
	}
	o := outward{method: args.Method, path: path, headers: args.Headers, body: []byte(args.Body)}
	what := fmt.Sprintf("%s %s %s", args.Connection, args.Method, args.Path)
	r, err := w.broker.exchange(ctx, o)
	if err == nil {
		err = r.refusal()
	}
	if err != nil {
		return w.refused(what, err)
	}
	w.record(what, fmt.Sprintf("status %d", r.status))
	return r.text()
}

// below is the broker's path of a connection's path, which may have a query.
func below(name, path string) (string, error) {
	if !strings.HasPrefix(path, "/") {
		return "", errors.New(`"path" must start with /`)
	}
	u, err := url.Parse(path)
	if err != nil || u.Host != "" || u.Fragment != "" {
		return "", errors.New(`"path" must be a path, and a query if need be`)
	}
	return "/connections/" + url.PathEscape(name) + path, nil
}

func (w *worker) sqlQuery(ctx context.Context, arguments []byte) string {
	var args struct {
		Connection string            `json:"connection"`
		SQL        string            `json:"sql"`
		Params     []json.RawMessage `json:"params"`
		MaxRows    json.Number       `json:"max_rows"`
	}
	if err := parse(arguments, &args); err != nil {
		return failure(err)
	}
	if err := w.permits.check(args.Connection, kindPostgres); err != nil {
		return failure(err)
	}
	rows, err := count(args.MaxRows, 100, 1<<31)
	if err != nil || rows == 0 || strings.TrimSpace(args.SQL) == "" {
		return failure(errors.New(`want "sql", and "max_rows" above zero if any`))
	}
	body := map[string]any{"sql": args.SQL, "max_rows": rows}
	if len(args.Params) > 0 {
		body["params"] = args.Params
	}
	what := fmt.Sprintf("%s: %s", args.Connection, args.SQL)
	var answer struct {
		Columns   json.RawMessage   `json:"columns"`
		Rows      []json.RawMessage `json:"rows"`
		RowCount  int64             `json:"row_count"`
		Truncated bool              `json:"truncated"`
	}
	if err := w.post(ctx, "/connections/"+url.PathEscape(args.Connection)+"/sql", body, &answer); err != nil {
		return w.refused(what, err)
	}
	w.record(what, fmt.Sprintf("%d rows", answer.RowCount))
	var b strings.Builder
	fmt.Fprintf(&b, "%d rows", answer.RowCount)
	if answer.Truncated {
		b.WriteString(" (there are more)")
	}
	fmt.Fprintf(&b, "\ncolumns: %s\n", answer.Columns)
	for _, row := range answer.Rows {
		b.Write(row)
		b.WriteByte('\n')
	}
	return bound(b.String(), maxResult)
}

// check tells whether a run has a connection of a kind.
func (p *permits) check(name, kind string) error {
	var names []string
	for _, c := range p.connections {
		if c.Kind != kind {
			continue
		}
		if c.Name == name {
			return nil
		}
		names = append(names, c.Name)
	}
	return fmt.Errorf("there is no connection %q for this tool, only %s", bound(name, 64), strings.Join(names, ", "))
}

// refused is the result of a call that the broker did not make, or that failed.
func (w *worker) refused(what string, err error) string {
	w.record(what, "failed: "+bound(err.Error(), 256))
	return failure(err)
}

// text is an answer of a connection as the model sees it.
func (r *response) text() string {
	var b strings.Builder
	fmt.Fprintf(&b, "status %d\n", r.status)
	for _, name := range []string{"Content-Type", "Link", "Location", "Retry-After", "Content-Range", "ETag"} {
		if v := r.header.Get(name); v != "" {
			fmt.Fprintf(&b, "%s: %s\n", name, bound(v, 1<<10))
		}
	}
	b.WriteByte('\n')
	if r.cut {
		b.WriteString("(only the beginning was received)\n")
	}
	if !utf8.Valid(r.body) && !r.cut {
		fmt.Fprintf(&b, "(%d bytes that are no text)", len(r.body))
		return b.String()
	}
	return b.String() + bound(string(r.body), maxResult)
}
