package broker

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"mime"
	"net/http"
	"net/http/httptrace"
	"regexp"
	"time"

	"github.com/ephemeral-run/ephemeral/broker/secret"
	"github.com/ephemeral-run/ephemeral/broker/sse"
)

// The bounds of a provider's answer.
const (
	maxEvent       = 1 << 20
	maxAnswer      = 16 << 20
	maxErrorBody   = 64 << 10
	maxErrorText   = 1 << 10
	reuseTimeout   = time.Second
	bytesPerToken  = 128 // the longest token of the vocabularies in use
	overLimitSlack = 4 << 10
)

// failure is an attempt that gave no answer, or not all of it.
type failure struct {
	reason  string // for guests, events and logs: never anything that the provider wrote
	retry   bool
	after   time.Duration // what the provider asked to wait
	problem *problem      // what the guest gets instead of a model_error
	cause   error
}

func (f *failure) Error() string { return f.reason }
func (f *failure) Unwrap() error { return f.cause }

// attempt calls the provider once and relays what it answers. On success the call is settled when it returns. After an
// error it is not, and when c.started is still false nothing has been written to the guest.
func (c *call) attempt(ctx context.Context, out *guestWriter) error {
	c.status, c.meter = 0, meter{}
	report, err := c.provider.enter()
	if err != nil {
		return &failure{reason: errCircuit.Error(), retry: true, cause: err}
	}
	trace := httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{WroteHeaders: func() { c.sent.Store(true) }})
	resp, err := c.provider.send(trace, c.body, c.req.stream, c.h.b.cfg.IdleTimeout)
	report(verdict(ctx, resp, err))
	if errors.Is(err, errSilent) {
		return &failure{reason: errSilent.Error(), retry: true, cause: err}
	}
	if err != nil {
		return &failure{reason: "the provider could not be reached", retry: true, cause: err}
	}
	c.status = resp.StatusCode
	if resp.StatusCode != http.StatusOK {
		defer resp.Body.Close()
		c.sent.Store(false) // it was answered: there is nothing to pay
		return c.refused(resp)
	}
	kind, _, _ := mime.ParseMediaType(resp.Header.Get("Content-Type"))
	if (kind == "text/event-stream") != c.req.stream {
		resp.Body.Close()
		return &failure{reason: "the provider answered in another form than asked for"}
	}
	if !c.req.stream {
		defer resp.Body.Close()
		return c.relayWhole(resp.Body, out)
	}
	err = c.relayStream(resp.Body, out)
	if err != nil {
		resp.Body.Close()
		return err
	}
	c.h.reuse(resp.Body)
	return nil
}

// reuse reads the last bytes of a finished answer aside, so that the connection can serve the next call.
func (h *Handler) reuse(body io.ReadCloser) {
	if !h.begin() {
		body.Close()
		return
	}
	go func() {
		defer h.active.Done()
		late := time.AfterFunc(reuseTimeout, func() { body.Close() })
		_, _ = io.CopyN(io.Discard, body, maxErrorBody)
		late.Stop()
		body.Close()
	}()
}

// refused turns an answer other than 200 into a failure.
func (c *call) refused(resp *http.Response) *failure {
	data, err := io.ReadAll(io.LimitReader(resp.Body, maxErrorBody))
	if err != nil {
		data = nil
	}
	code, message := c.upstreamError(data)
	switch s := resp.StatusCode; {
	case s == http.StatusBadRequest || s == http.StatusRequestEntityTooLarge || s == http.StatusUnprocessableEntity:
		if message == "" {
			message = "the provider refused the request"
		}
		return &failure{reason: "the provider refused the request", problem: &problem{status: http.StatusBadRequest, code: code, message: message, upstream: s}}
	case s == http.StatusUnauthorized || s == http.StatusForbidden:
		return &failure{reason: "the provider refused the credentials of this host"}
	case s == http.StatusNotFound:
		return &failure{reason: "the provider does not know the model"}
	case s == http.StatusTooManyRequests && code == "insufficient_quota":
		return &failure{reason: "this host's account at the provider is exhausted"}
	case s == http.StatusTooManyRequests:
		return &failure{reason: "the provider is overloaded", retry: true, after: retryAfter(resp.Header)}
	case s == http.StatusRequestTimeout || s == http.StatusTooEarly || s >= 500 && s != http.StatusNotImplemented:
		return &failure{reason: "the provider failed", retry: true, after: retryAfter(resp.Header)}
	}
	return &failure{reason: "the provider gave no answer"}
}

var codePattern = regexp.MustCompile(`^[a-z0-9_.-]{1,64}$`)

// upstreamError reads a provider's error document: a code of harmless form and a short message without credentials.
func (c *call) upstreamError(data []byte) (code, message string) {
	var doc struct {
		Error struct {
			Code    any    `json:"code"`
			Message string `json:"message"`
		} `json:"error"`
	}
	if json.Unmarshal(data, &doc) != nil || c.h.b.hidden(data) {
		return codeInvalid, ""
	}
	code = codeInvalid
	if s, ok := doc.Error.Code.(string); ok && codePattern.MatchString(s) && !c.h.b.scrubber.Found([]byte(s)) {
		code = s
	}
	clean := string(c.h.b.scrubber.Scrub([]byte(doc.Error.Message)))
	if len(clean) > maxErrorText {
		clean = clean[:maxErrorText]
	}
	return code, string(bytes.ToValidUTF8([]byte(clean), nil))
}

// relayWhole passes an answer on that comes as one document.
func (c *call) relayWhole(body io.Reader, out *guestWriter) error {
	data, err := io.ReadAll(io.LimitReader(body, maxAnswer+1))
	if err != nil {
		return &failure{reason: "the provider's answer broke off", retry: true, cause: err}
	}
	if len(data) > maxAnswer {
		return &failure{reason: "the provider's answer is too long"}
	}
	data = c.h.b.scrubber.Scrub(data)
	var doc completion
	if err := json.Unmarshal(data, &doc); err != nil || len(doc.Choices) == 0 {
		return &failure{reason: "the provider's answer makes no sense", retry: true, cause: err}
	}
	if c.h.b.hidden(data) {
		return &failure{reason: errLeak.Error()}
	}
	c.meter.addWhole(&doc)
	c.settle()
	out.whole(data)
	return nil
}

// relayStream passes events on as they come. The last one waits until the call is settled, so that the guest's next call
// finds the money that this one did not use.
func (c *call) relayStream(body io.Reader, out *guestWriter) error {
	events := sse.NewReader(io.LimitReader(body, maxAnswer), maxEvent)
	g := &gate{scrubber: c.h.b.scrubber, write: func(raw []byte) {
		c.started = true
		out.event(raw)
	}}
	for {
		event, err := events.Next()
		if err == io.EOF && c.meter.finished {
			if !g.finish() {
				return &failure{reason: errLeak.Error()}
			}
			c.settle()
			return nil
		}
		if err != nil {
			return c.brokenStream(err)
		}
		if string(event.Data) == "[DONE]" {
			if !c.meter.finished {
				return &failure{reason: "the provider's stream ended early", retry: true}
			}
			if !g.finish() {
				return &failure{reason: errLeak.Error()}
			}
			c.settle()
			out.event(event.Raw)
			return nil
		}
		if err := c.relayEvent(event, g); err != nil {
			return err
		}
	}
}

func (c *call) brokenStream(err error) *failure {
	switch {
	case errors.Is(err, errSilent):
		return &failure{reason: errSilent.Error(), retry: true, cause: err}
	case errors.Is(err, sse.ErrTooLong):
		return &failure{reason: "the provider's stream has too long an event", cause: err}
	}
	return &failure{reason: "the provider's stream broke off", retry: true, cause: err}
}

func (c *call) relayEvent(event sse.Event, g *gate) error {
	data := c.h.b.scrubber.Scrub(event.Data)
	var chunk completion
	if err := json.Unmarshal(data, &chunk); err != nil {
		return &failure{reason: "the provider's stream makes no sense", retry: true, cause: err}
	}
	if len(chunk.Error) > 0 && string(chunk.Error) != "null" {
		return &failure{reason: "the provider failed in the middle of its answer", retry: true}
	}
	c.meter.addChunk(&chunk)
	if c.meter.textBytes > c.limit*bytesPerToken+overLimitSlack {
		return &failure{reason: "the provider does not keep to the output limit"}
	}
	if c.h.b.hidden(data) {
		return &failure{reason: errLeak.Error()}
	}
	if len(chunk.Choices) == 0 && !c.req.includeUsage {
		return nil // the usage that only the broker asked for
	}
	if !g.push(c.h.b.scrubber.Scrub(event.Raw), &chunk) {
		return &failure{reason: errLeak.Error()}
	}
	return nil
}

// hidden tells whether a JSON document holds a credential behind escapes, where scrubbing its bytes does not find it.
func (b *Broker) hidden(data []byte) bool {
	if b.scrubber.Longest() == 0 || !bytes.ContainsRune(data, '\\') {
		return false
	}
	var v any
	if json.Unmarshal(data, &v) != nil {
		return true // nobody knows what is in it
	}
	return anyString(v, b.scrubber)
}

func anyString(v any, s *secret.Scrubber) bool {
	switch v := v.(type) {
	case string:
		return s.Found([]byte(v))
	case []any:
		for _, e := range v {
			if anyString(e, s) {
				return true
			}
		}
	case map[string]any:
		for k, e := range v {
			if s.Found([]byte(k)) || anyString(e, s) {
				return true
			}
		}
	}
	return false
}
