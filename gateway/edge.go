package gateway

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"mime"
	"net"
	"net/http"
	"runtime/debug"
	"strings"
	"time"

	"github.com/gofiber/fiber/v2"
	"github.com/valyala/fasthttp"

	"github.com/ephemeral-run/ephemeral/run"
	"github.com/ephemeral-run/ephemeral/run/tracing"
)

// call is what is known of one request while it is served.
type call struct {
	id        string
	start     time.Time
	method    string
	path      string
	remote    string
	route     string // pattern of the route; "" when none matched
	key       run.Key
	run       run.ID
	trace     *tracing.Request            // nil: no trace of this request
	secret    bool                        // a key was presented
	valid     func(context.Context) error // asks whether what was presented may still be used; nil: nothing was
	streaming bool                        // the answer goes on after the handler; whoever streams writes the log line
	bodyRead  bool                        // the body was read to its end; reading on would take bytes of the next request
	code      Code                        // of the problem that was answered with
}

type callKey struct{}

// callOf returns the request's call and makes it at first use. The client's X-Request-Id is kept when it is harmless.
func callOf(c *fiber.Ctx) *call {
	if k, ok := c.Locals(callKey{}).(*call); ok {
		return k
	}
	id := c.Get(headerRequestID)
	if !validRequestID(id) {
		id = rand.Text()
	}
	k := &call{id: id, start: time.Now(), method: c.Method(), path: c.Path(), remote: remoteOf(c.Context().Conn())}
	c.Locals(callKey{}, k)
	setHeader(c, headerRequestID, id)
	return k
}

func requestID(c *fiber.Ctx) string { return callOf(c).id }

// challenge is the WWW-Authenticate header (RFC 6750).
func challenge(c *fiber.Ctx) string {
	if callOf(c).secret {
		return `Bearer realm="ephemeral", error="invalid_token"`
	}
	return `Bearer realm="ephemeral"`
}

// secureHeaders are on every answer: nothing of the API is for caches or for guessing browsers.
func secureHeaders(c *fiber.Ctx) {
	setHeader(c, fiber.HeaderCacheControl, "no-store")
	setHeader(c, fiber.HeaderXContentTypeOptions, "nosniff")
}

// edge surrounds every request: id, panics, problems, log and metrics.
func (s *Server) edge(c *fiber.Ctx) error {
	k := callOf(c)
	secureHeaders(c)
	if !s.cors.serve(c) {
		if err := protect(c); err != nil {
			if err := s.refuse(c, err); err != nil {
				return err
			}
		}
	}
	discardBody(c, int64(2*s.cfg.BodyLimit))
	if !k.streaming {
		s.answered(c, k)
	}
	return nil
}

// answered writes log and metrics of an answer. A client that went away before it counts as such.
func (s *Server) answered(c *fiber.Ctx, k *call) {
	status, end := c.Response().StatusCode(), ""
	if (k.code == CodeBadRequest || time.Since(k.start) > goneAfter) && gone(c.Context().Conn()) {
		status, end = statusGone, errGone.Error()
	} else if k.code != "" {
		s.metrics.refused(k.code)
	}
	k.trace.End(status)
	s.observe(k, status, answerSize(c), end)
}

// protect runs the handlers and turns a panic into an error.
func protect(c *fiber.Ctx) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = problem(CodeInternal, "").because(fmt.Errorf("panic: %v\n%s", r, debug.Stack()))
		}
	}()
	return c.Next()
}

// refuse answers with the problem that err is and logs what the client is not told.
func (s *Server) refuse(c *fiber.Ctx, err error) error {
	p := toProblem(err)
	if p.Code == CodeUnavailable && errors.Is(p.cause, run.ErrUnavailable) {
		if full := s.deps.Store.Full(); full != nil { // which is why, whatever the store's client saw of it
			p = storageFull(errors.Join(full, p.cause))
		}
	}
	if p.Status >= http.StatusInternalServerError && p.cause != nil {
		level := slog.LevelError
		if p.Code == CodeNotReady { // what a probe asks for is no failure
			level = slog.LevelDebug
		}
		s.log.Log(c.UserContext(), level, "request failed", "request_id", requestID(c), "code", p.Code, "error", p.cause)
	}
	callOf(c).code = p.Code
	return writeProblem(c, p)
}

// serverError answers what the HTTP server refuses before any handler: bad syntax, large headers, slow requests.
func (s *Server) serverError(c *fiber.Ctx, err error) error {
	k := callOf(c)
	c.Context().SetConnectionClose()
	if err := s.refuse(c, err); err != nil {
		return err
	}
	s.answered(c, k)
	return nil
}

// knownMethod answers methods that Fiber does not know with a problem, as for any method that a resource does not have.
func (s *Server) knownMethod(app *fiber.App, next fasthttp.RequestHandler) fasthttp.RequestHandler {
	known := map[string]bool{}
	for _, m := range fiber.DefaultMethods {
		known[m] = true
	}
	return func(ctx *fasthttp.RequestCtx) {
		if known[string(ctx.Method())] {
			next(ctx)
			return
		}
		c := app.AcquireCtx(ctx)
		defer app.ReleaseCtx(c)
		c.Set(fiber.HeaderAllow, "GET, HEAD, POST, PUT, DELETE")
		callOf(c)
		if s.cors.serve(c) {
			return
		}
		if err := s.serverError(c, fiber.ErrMethodNotAllowed); err != nil {
			s.log.Error("answer failed", "error", err)
		}
	}
}

// named notes the route's pattern, which stands for the path in metrics.
func (s *Server) named(pattern string, h fiber.Handler) fiber.Handler {
	return func(c *fiber.Ctx) error {
		callOf(c).route = pattern
		return h(c)
	}
}

// handler answers a request of an authenticated key. ctx bounds the store calls.
type handler func(ctx context.Context, c *fiber.Ctx, key run.Key) error

// as authenticates the request, demands the role and calls h.
func (s *Server) as(role run.Role, h handler) fiber.Handler {
	return func(c *fiber.Ctx) error {
		ctx := s.deadline()
		authorization := headerValues(c, fiber.HeaderAuthorization)
		k := callOf(c)
		k.secret = len(authorization) > 0
		secret, ok := bearer(authorization)
		if !ok {
			return problem(CodeUnauthenticated, "")
		}
		key, allowance, err := s.deps.Store.AuthenticateAt(ctx, secret, s.rate)
		k.key = key
		k.valid = func(ctx context.Context) error { return s.deps.Store.CheckKey(ctx, key.ID) }
		if errors.Is(err, run.ErrRateLimited) {
			s.allowance(c, allowance)
			p := problem(CodeRateLimited, "")
			p.retryAfter = allowance.Wait
			return p
		}
		if err != nil {
			return err
		}
		s.allowance(c, allowance)
		if key.Role != role {
			return problem(CodeForbidden, fmt.Sprintf("This needs a key of role %s, the key's role is %s.", role, key.Role))
		}
		return h(ctx, c, key)
	}
}

// readBody reads a JSON body of at most BodyLimit bytes into memory and returns it with a function that gives the
// memory back. Bodies are read after authentication, and all bodies in memory together are bounded.
func (s *Server) readBody(ctx context.Context, c *fiber.Ctx) (body []byte, release func(), err error) {
	if err := checkMedia(c); err != nil {
		return nil, nil, err
	}
	limit := int64(s.cfg.BodyLimit)
	size := int64(c.Request().Header.ContentLength()) // negative: chunked
	if size > limit {
		return nil, nil, problem(CodeBodyTooLarge, fmt.Sprintf("The request body has %d bytes, at most %d are allowed.", size, limit))
	}
	held := size
	if size < 0 {
		held = limit
	}
	held = min(held, int64(s.cfg.BodyMemory))
	if err := s.bodies.Acquire(ctx, held); err != nil {
		return nil, nil, problem(CodeUnavailable, "Too many large requests are being read.").because(err)
	}
	release = func() { s.bodies.Release(held) }
	body, err = readLimited(c.Request().BodyStream(), size, limit)
	if err != nil {
		release()
		return nil, nil, err
	}
	callOf(c).bodyRead = true
	return body, release, nil
}

// readLimited reads r to its end, which is after size bytes unless that is negative.
func readLimited(r io.Reader, size, limit int64) (body []byte, err error) {
	switch {
	case r == nil:
		return nil, nil
	case size >= 0: // into one piece of memory that need not grow
		body = make([]byte, size)
		var n int
		if n, err = io.ReadFull(r, body); errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			err = nil
		}
		body = body[:n]
	default:
		body, err = io.ReadAll(io.LimitReader(r, limit+1))
	}
	var ne net.Error
	switch {
	case errors.As(err, &ne) && ne.Timeout():
		return nil, problem(CodeRequestTimeout, "")
	case err != nil:
		return nil, problem(CodeBadRequest, "The request body could not be read to its end.").because(err)
	case int64(len(body)) > limit:
		return nil, problem(CodeBodyTooLarge, fmt.Sprintf("The request body has more than %d bytes.", limit))
	}
	return body, nil
}

// checkMedia demands an uncompressed JSON body: unpacking is a way to send far more than BodyLimit.
func checkMedia(c *fiber.Ctx) error {
	if contentType := c.Get(fiber.HeaderContentType); contentType != fiber.MIMEApplicationJSON {
		mediaType, params, err := mime.ParseMediaType(contentType)
		if err != nil || mediaType != fiber.MIMEApplicationJSON {
			return problem(CodeUnsupportedMediaType, "", FieldError{fiber.HeaderContentType, "must be application/json"})
		}
		if cs, ok := params["charset"]; ok && !strings.EqualFold(cs, "utf-8") {
			return problem(CodeUnsupportedMediaType, "", FieldError{fiber.HeaderContentType, "must be in UTF-8"})
		}
	}
	if enc := c.Get(fiber.HeaderContentEncoding); enc != "" && !strings.EqualFold(enc, "identity") {
		return problem(CodeUnsupportedMediaType, "", FieldError{fiber.HeaderContentEncoding, "must not be used"})
	}
	return nil
}

// discardBody takes what is left of the request's body, so that the client has sent everything and reads the answer
// instead of a reset, and so that the rest cannot be taken for a next request. After limit bytes the connection ends.
func discardBody(c *fiber.Ctx, limit int64) {
	r := c.Request().BodyStream()
	if r == nil || callOf(c).bodyRead {
		return
	}
	n, err := io.Copy(io.Discard, io.LimitReader(r, limit))
	if err != nil || n == limit {
		c.Context().SetConnectionClose()
	}
}

// observe writes the access log line and the metrics of a request that was answered.
func (s *Server) observe(k *call, status, size int, end string) {
	d := time.Since(k.start)
	s.metrics.request(k, status, d)
	level := slog.LevelInfo
	if k.route == "/healthz" || k.route == "/readyz" || k.route == "/metrics" {
		level = slog.LevelDebug
	}
	attrs := []slog.Attr{
		slog.String("request_id", k.id), slog.String("method", shorten(k.method)), slog.String("path", shortenPath(k.path)),
		slog.Int("status", status), slog.Duration("duration", d), slog.Int("bytes", size), slog.String("remote", k.remote),
	}
	if k.key.ID != "" {
		attrs = append(attrs, slog.String("key", k.key.ID), slog.String("org", k.key.Org))
	}
	if k.run != "" {
		attrs = append(attrs, slog.String("run", string(k.run)))
	}
	if end != "" {
		attrs = append(attrs, slog.String("end", end))
	}
	s.access(level, attrs)
}

// access writes the line of a request. Unlike Logger.LogAttrs it does not look up where in the program it is called, which
// no line shows and which every request would pay for.
func (s *Server) access(level slog.Level, attrs []slog.Attr) {
	ctx, h := context.Background(), s.log.Handler()
	if !h.Enabled(ctx, level) {
		return
	}
	line := slog.NewRecord(time.Now(), level, "request", 0)
	line.AddAttrs(attrs...)
	_ = h.Handle(ctx, line) // as Logger does: there is nobody to tell
}

// shortenPath bounds a path for the log.
func shortenPath(p string) string {
	const limit = 256
	if len(p) > limit {
		return p[:limit] + "..."
	}
	return p
}
