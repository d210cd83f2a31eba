package worker

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"time"
)

// maxResponse bounds what is read of an answer, in bytes.
const maxResponse = 4 << 20

// errorHeader is on answers of the broker itself that are errors; an upstream cannot set it.
const errorHeader = "Ephemeral-Error"

// outward is one request to the broker.
type outward struct {
	method, path string
	headers      map[string]string
	body         []byte
}

// response is the answer.
type response struct {
	status int
	header http.Header
	body   []byte
	cut    bool // there was more
}

// refusal is the broker's error, if it is one.
func (r *response) refusal() error {
	if r.header.Get(errorHeader) == "" {
		return nil
	}
	return r.brokerError()
}

func (r *response) brokerError() *brokerError {
	return parseError(r.status, r.header, r.body)
}

// exchange makes a request, again after a pause when the broker could not take it: then nothing was called.
func (c *client) exchange(ctx context.Context, o outward) (*response, error) {
	for n := 1; ; n++ {
		r, err := c.request(ctx, o)
		if err != nil {
			return nil, err
		}
		switch r.header.Get(errorHeader) {
		case "unavailable", "too_many_requests", "rate_limited":
		default:
			return r, nil
		}
		pause := max(min(firstPause<<(n-1), mostPause), min(r.brokerError().after, mostPause))
		if n >= tries || c.sleep(ctx, pause) != nil {
			return r, nil
		}
	}
}

func (c *client) request(ctx context.Context, o outward) (*response, error) {
	req, err := http.NewRequestWithContext(ctx, o.method, BaseURL+o.path, bytes.NewReader(o.body))
	if err != nil {
		return nil, fmt.Errorf("this is no request: %w", err)
	}
	for name, value := range o.headers {
		req.Header.Set(name, value)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, fmt.Errorf("the request failed: %w", err)
	}
	defer resp.Body.Close()
	r := &response{status: resp.StatusCode, header: resp.Header}
	if r.body, err = io.ReadAll(io.LimitReader(resp.Body, maxResponse+1)); err != nil {
		return nil, fmt.Errorf("the answer broke off: %w", err)
	}
	if len(r.body) > maxResponse {
		r.body, r.cut = r.body[:maxResponse], true
	}
	return r, nil
}

// post sends JSON to a route of the broker and reads its JSON answer.
func (w *worker) post(ctx context.Context, path string, body, into any) error {
	data, err := json.Marshal(body)
	if err != nil {
		return fmt.Errorf("encode request: %w", err)
	}
	r, err := w.broker.exchange(ctx, outward{http.MethodPost, path, map[string]string{"Content-Type": "application/json"}, data})
	if err != nil {
		return err
	}
	if r.status != http.StatusOK {
		return r.brokerError()
	}
	if err := json.Unmarshal(r.body, into); err != nil {
		return errors.New("the broker's answer is no JSON of the form that it should have")
	}
	return nil
}

func parseError(status int, header http.Header, body []byte) *brokerError {
	e := &brokerError{status: status}
	var doc struct {
		Error errorDocument `json:"error"`
	}
	if json.Unmarshal(body, &doc) == nil {
		e.code, e.message = doc.Error.Code, doc.Error.Message
	}
	if s, err := strconv.Atoi(header.Get("Retry-After")); err == nil && s > 0 {
		e.after = time.Duration(min(s, 3600)) * time.Second
	}
	return e
}
