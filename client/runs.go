package client

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/ephemeral-run/ephemeral/run"
)

// Request asks for a run. Zero fields have the server's defaults. Exactly one of Prompt and Command is set.
type Request struct {
	Prompt            string            `json:"prompt,omitempty"`
	Command           string            `json:"command,omitempty"`
	Model             string            `json:"model,omitempty"` // "provider/model"
	Web               bool              `json:"web,omitempty"`
	Shell             *bool             `json:"shell,omitempty"` // nil: on
	Image             string            `json:"image,omitempty"` // empty: run.DefaultImage
	Files             []run.File        `json:"files,omitempty"`
	Connections       []string          `json:"connections,omitempty"`
	ExposeBroker      bool              `json:"expose_broker,omitempty"`
	TimeoutSeconds    int               `json:"timeout_seconds,omitempty"`
	MaxCostMicros     run.Micros        `json:"max_cost_micros,omitempty"`
	ZeroDataRetention bool              `json:"zero_data_retention,omitempty"`
	RetentionSeconds  int               `json:"retention_seconds,omitempty"` // 0: the organisation's
	Metadata          map[string]string `json:"metadata,omitempty"`
}

// sentFile is a run.File as it is sent: with its content, also where that is empty, or with an upload.
type sentFile struct {
	Path     string       `json:"path"`
	Content  *string      `json:"content,omitempty"`
	Upload   run.UploadID `json:"upload,omitempty"`
	Encoding string       `json:"encoding,omitempty"`
	Mode     string       `json:"mode,omitempty"`
}

// MarshalJSON writes the request as the API takes it.
func (r Request) MarshalJSON() ([]byte, error) {
	type plain Request
	files := make([]sentFile, len(r.Files))
	for i, f := range r.Files {
		files[i] = sentFile{Path: f.Path, Upload: f.Upload, Encoding: f.Encoding, Mode: f.Mode}
		if f.Upload == "" {
			files[i].Content = &r.Files[i].Content
		}
	}
	b, err := json.Marshal(struct {
		plain
		Files []sentFile `json:"files,omitempty"`
	}{plain(r), files})
	if err != nil {
		return nil, fmt.Errorf("encode run request: %w", err)
	}
	return b, nil
}

// CreateOptions say how a run is created.
type CreateOptions struct {
	IdempotencyKey string        // 1 to 255 visible ASCII characters; empty: a fresh one
	Wait           time.Duration // how long the server should wait for the run's end before it answers; whole seconds
}

// Created is a run that the server accepted.
type Created struct {
	Run            run.Run // ended when the server waited long enough
	Replayed       bool    // the idempotency key had been used: this is the run of that time, as it is now
	IdempotencyKey string  // the one that was sent; with it and the same request the call can be repeated
}

// CreateRun creates a run, exactly one, however often the request has to be sent.
func (c *Client) CreateRun(ctx context.Context, r Request, o CreateOptions) (Created, error) {
	body, err := encode(r)
	if err != nil {
		return Created{}, err
	}
	return c.CreateRunJSON(ctx, body, o)
}

// CreateRunJSON is CreateRun for a request that is JSON already. It is sent as it is.
func (c *Client) CreateRunJSON(ctx context.Context, body json.RawMessage, o CreateOptions) (Created, error) {
	if o.IdempotencyKey == "" {
		o.IdempotencyKey = rand.Text()
	}
	created := Created{IdempotencyKey: o.IdempotencyKey}
	r := request{
		method: http.MethodPost, path: "/v1/runs", body: body, repeat: true, wait: o.Wait,
		header: map[string]string{"Idempotency-Key": quote(o.IdempotencyKey)},
	}
	if o.Wait > 0 {
		r.header["Prefer"] = prefer(o.Wait)
	}
	header, err := c.callHeader(ctx, r, &created.Run)
	if err != nil {
		return created, err
	}
	created.Replayed = header.Get("Idempotency-Replayed") == "true"
	return created, nil
}

// quote writes a string of structured fields (RFC 8941).
func quote(s string) string {
	q := make([]byte, 0, len(s)+2)
	q = append(q, '"')
	for i := range len(s) {
		if s[i] == '"' || s[i] == '\\' {
			q = append(q, '\\')
		}
		q = append(q, s[i])
	}
	return string(append(q, '"'))
}

// prefer writes a wait preference (RFC 7240).
func prefer(d time.Duration) string {
	return "wait=" + strconv.Itoa(int((d+time.Second-1)/time.Second))
}

func runPath(id run.ID) string { return "/v1/runs/" + url.PathEscape(string(id)) }

// Run returns a run.
func (c *Client) Run(ctx context.Context, id run.ID) (run.Run, error) {
	var r run.Run
	err := c.call(ctx, request{method: http.MethodGet, path: runPath(id), repeat: true}, &r)
	return r, err
}

// waitStep is how long one request of Wait waits.
const waitStep = 30 * time.Second

// Wait returns the run when it has ended, or ctx's error. It survives a server that restarts.
func (c *Client) Wait(ctx context.Context, id run.ID) (run.Run, error) {
	for {
		var r run.Run
		started := time.Now()
		err := c.call(ctx, request{
			method: http.MethodGet, path: runPath(id), repeat: true, wait: waitStep,
			header: map[string]string{"Prefer": prefer(waitStep)},
		}, &r)
		if err != nil || r.State.Terminal() {
			return r, err
		}
		if early := time.Second - time.Since(started); early > 0 { // a server that drains, or that does not wait
			select {
			case <-ctx.Done():
				return r, fmt.Errorf("wait for %s: %w", id, context.Cause(ctx))
			case <-time.After(early):
			}
		}
	}
}

// RunList is one page of runs.
type RunList struct {
	Runs       []run.Run `json:"runs"`
	NextCursor string    `json:"next_cursor"` // for the next page; empty on the last
}

// Runs returns a page of runs, newest first, without files' contents and results.
func (c *Client) Runs(ctx context.Context, p run.Page) (RunList, error) {
	q := url.Values{}
	if p.Cursor != "" {
		q.Set("cursor", p.Cursor)
	}
	if p.Limit != 0 {
		q.Set("limit", strconv.Itoa(p.Limit))
	}
	if p.State != "" {
		q.Set("state", string(p.State))
	}
	if !p.QueuedFrom.IsZero() {
		q.Set("queued_from", p.QueuedFrom.Format(time.RFC3339Nano))
	}
	if !p.QueuedTo.IsZero() {
		q.Set("queued_to", p.QueuedTo.Format(time.RFC3339Nano))
	}
	for key, value := range p.Metadata {
		q.Set("metadata["+key+"]", value)
	}
	var l RunList
	err := c.call(ctx, request{method: http.MethodGet, path: "/v1/runs", query: q, repeat: true}, &l)
	return l, err
}

// Cancel asks for the run's end and returns the run; one that was not queued ends a little later. An ended run stays as
// it is.
func (c *Client) Cancel(ctx context.Context, id run.ID) (run.Run, error) {
	var r run.Run
	err := c.call(ctx, request{method: http.MethodPost, path: runPath(id) + "/cancel", repeat: true}, &r)
	return r, err
}

// Delete erases the content of an ended run. The record of its money stays.
func (c *Client) Delete(ctx context.Context, id run.ID) error {
	return c.call(ctx, request{method: http.MethodDelete, path: runPath(id), repeat: true}, nil)
}

// Usage returns the usage of the key's organisation by day, from the first to the last, both included; of both only the
// date in UTC counts. At most 366 days.
func (c *Client) Usage(ctx context.Context, first, last time.Time) ([]run.DayUsage, error) {
	return c.usage(ctx, "/v1/usage", first, last)
}

func (c *Client) usage(ctx context.Context, path string, first, last time.Time) ([]run.DayUsage, error) {
	var l struct {
		Days []run.DayUsage `json:"days"`
	}
	q := url.Values{"from": {first.UTC().Format(time.DateOnly)}, "to": {last.UTC().Format(time.DateOnly)}}
	err := c.call(ctx, request{method: http.MethodGet, path: path, query: q, repeat: true}, &l)
	return l.Days, err
}

// Account returns the account of the key's organisation.
func (c *Client) Account(ctx context.Context) (run.Account, error) {
	var a run.Account
	err := c.call(ctx, request{method: http.MethodGet, path: "/v1/account", repeat: true}, &a)
	return a, err
}
