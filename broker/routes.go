package broker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/ephemeral-run/ephemeral/run"
)

// The headers that have a meaning on every route; ROUTES.md describes them.
const (
	headerError  = "Ephemeral-Error"
	headerRun    = "Ephemeral-Run"
	headerCallID = "Ephemeral-Call-Id"
)

const maxCallID = 128

// ServeHTTP answers one request of the guest.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	heard(r.Context())
	if !h.begin() {
		(&problem{status: http.StatusGone, code: codeRunEnded, message: "the run has ended"}).write(w)
		return
	}
	defer h.active.Done()
	if err := h.route(w, r); err != nil {
		var p *problem
		if !errors.As(err, &p) {
			h.log.Error("broker request failed", "error", err)
			p = &problem{status: http.StatusInternalServerError, code: codeUnavailable, message: "the broker failed"}
		}
		if suspicious[p.code] {
			h.refuse(p.code)
		}
		p.write(w)
	}
}

// action serves a route once the request was admitted.
type action func(w http.ResponseWriter, r *http.Request) error

// route finds what the request is for, and admits it. What the run does not allow does not exist.
func (h *Handler) route(w http.ResponseWriter, r *http.Request) error {
	do, method := h.find(r.URL.EscapedPath())
	if do == nil {
		return &problem{status: http.StatusNotFound, code: codeNotFound, message: "there is nothing here for this run"}
	}
	if method != "" && r.Method != method {
		w.Header().Set("Allow", method)
		return &problem{status: http.StatusMethodNotAllowed, code: codeMethod, message: "want " + method}
	}
	if err := h.identify(r); err != nil {
		return err
	}
	release, err := h.admit(r.Context())
	if err != nil {
		return err
	}
	defer release()
	return do(w, r)
}

// find returns what serves a path, and the only method it takes; an empty method: the route decides.
func (h *Handler) find(path string) (do action, method string) {
	spec := h.s.Spec
	switch path {
	case "/v1/chat/completions":
		if spec.Model != "" {
			return h.chat, http.MethodPost
		}
	case "/v1/models":
		if spec.Model != "" {
			return h.models, http.MethodGet
		}
	case "/connections":
		return h.listConnections, http.MethodGet
	case "/web/fetch":
		if spec.Web {
			return h.webFetch, http.MethodPost
		}
	case "/web/search":
		if spec.Web && h.b.web.CanSearch() {
			return h.webSearch, http.MethodPost
		}
	}
	rest, ok := strings.CutPrefix(path, "/connections/")
	name, below, _ := strings.Cut(rest, "/")
	if !ok || !h.allows(name) {
		return nil, ""
	}
	return func(w http.ResponseWriter, r *http.Request) error { return h.connection(w, r, name, "/"+below) }, ""
}

// identify refuses a request that says it is of another run, and one whose call id was there before. Neither is needed to
// tell runs or calls apart: the socket and the broker's own ids do.
func (h *Handler) identify(r *http.Request) error {
	for _, id := range r.Header.Values(headerRun) {
		if id != string(h.s.Run) {
			return &problem{status: http.StatusForbidden, code: codeWrongRun, message: "this machine belongs to another run"}
		}
	}
	ids := r.Header.Values(headerCallID)
	if len(ids) == 0 {
		return nil
	}
	id := ids[0]
	if len(ids) > 1 || id == "" || len(id) > maxCallID || strings.ContainsFunc(id, func(r rune) bool { return r <= ' ' || r > '~' }) {
		return invalid(headerCallID, "want one id of 1 to %d visible ASCII characters", maxCallID)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.named[id] {
		return &problem{status: http.StatusConflict, code: codeReplayed, message: "a call with this id was made before"}
	}
	if len(h.named) < h.b.cfg.MaxCalls { // no more calls than that are admitted
		h.named[id] = true
	}
	return nil
}

// models answers with the one model of the run, in the form that OpenAI clients know.
func (h *Handler) models(w http.ResponseWriter, _ *http.Request) error {
	owner, _, _ := strings.Cut(h.s.Spec.Model, "/")
	return writeJSON(w, map[string]any{
		"object": "list",
		"data":   []any{map[string]any{"id": h.s.Spec.Model, "object": "model", "created": 0, "owned_by": owner}},
	})
}

func writeJSON(w http.ResponseWriter, v any) error {
	data, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("encode answer: %w", err)
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	w.Header().Set("Content-Length", fmt.Sprint(len(data)))
	// A connection without deadlines is still bounded by the run's own end.
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(writeTimeout))
	_, _ = w.Write(data) // a guest that is gone needs no answer
	return nil
}

// readJSON reads a small body into v. Unknown fields are refused.
func (h *Handler) readJSON(w http.ResponseWriter, r *http.Request, v any) error {
	data, err := readBody(w, r, maxBody, h.b.bodyTimeout)
	if err != nil {
		return err
	}
	if err := strictJSON(data, v); err != nil {
		return invalid("", "the body makes no sense: %v", err)
	}
	return nil
}

// strictJSON decodes exactly one JSON value without unknown fields.
func strictJSON(data []byte, v any) error {
	d := json.NewDecoder(strings.NewReader(string(data)))
	d.DisallowUnknownFields()
	if err := d.Decode(v); err != nil {
		return err
	}
	if _, err := d.Token(); err != io.EOF {
		return errors.New("something follows it")
	}
	return nil
}

// allows tells whether the run names the connection.
func (h *Handler) allows(name string) bool {
	for _, c := range h.s.Spec.Connections {
		if c == name {
			return true
		}
	}
	return false
}

// during is the context of an outward call: it ends with the guest's request, with the run, and after the given time.
func (h *Handler) during(guest context.Context, d time.Duration) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithTimeout(guest, d)
	stop := context.AfterFunc(h.ctx, cancel)
	return ctx, func() { stop(); cancel() }
}

// emit passes an event on. One that tells of an outward call gets its receipt.
func (h *Handler) emit(t run.EventType, data any, call string) {
	if h.s.Emit == nil {
		return
	}
	e := run.NewEvent{Type: t, At: time.Now(), Data: data}
	h.sign(&e, call)
	h.s.Emit(e)
}
