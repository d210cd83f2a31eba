package broker

import (
	"context"
	"errors"
	"net/http"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/ephemeral-run/ephemeral/broker/secret"
	"github.com/ephemeral-run/ephemeral/run"
	"github.com/ephemeral-run/ephemeral/run/connection"
)

// ConnectionStore finds an organisation's connections; *run.Store has it. The error is run.ErrNotFound when there is none.
type ConnectionStore interface {
	Connection(ctx context.Context, org, name string) (connection.Sealed, error)
}

const lookupTimeout = 10 * time.Second

// opened is a connection that is ready for use.
type opened struct {
	connection.Connection
	org        string
	credential secret.Value
	scrubber   *secret.Scrubber // finds the credential in what comes back
}

// upstreams remembers what connections need between calls. It holds nothing that cannot be made anew.
type upstreams struct {
	mu       sync.Mutex
	rates    map[string]*limited         // by organisation and name
	scrubber map[string]*secret.Scrubber // by sealed credential
}

// limited is the rate of one connection.
type limited struct {
	*rate.Limiter
	perMinute int
}

// remembered bounds each of the maps; a full one is forgotten.
const remembered = 4096

// scrubberOf makes the scrubber of a credential once.
func (u *upstreams) scrubberOf(sealed string, credential secret.Value) *secret.Scrubber {
	u.mu.Lock()
	defer u.mu.Unlock()
	if s, ok := u.scrubber[sealed]; ok {
		return s
	}
	if u.scrubber == nil || len(u.scrubber) >= remembered {
		u.scrubber = map[string]*secret.Scrubber{}
	}
	s := secret.NewScrubber(credential)
	u.scrubber[sealed] = s
	return s
}

// take spends one call of a connection's rate. When there is none left it returns how long to wait.
func (u *upstreams) take(c *opened) (wait time.Duration) {
	u.mu.Lock()
	defer u.mu.Unlock()
	key := c.org + "/" + c.Name
	l, ok := u.rates[key]
	if !ok || l.perMinute != c.RatePerMinute {
		if u.rates == nil || len(u.rates) >= remembered {
			u.rates = map[string]*limited{}
		}
		l = &limited{rate.NewLimiter(rate.Limit(float64(c.RatePerMinute)/60), max(c.RatePerMinute/6, 1)), c.RatePerMinute}
		u.rates[key] = l
	}
	r := l.Reserve()
	if wait = r.Delay(); wait > 0 {
		r.Cancel()
	}
	return wait
}

// open finds a connection of the run's organisation, as it is now, and its credential.
func (h *Handler) open(ctx context.Context, name string) (*opened, error) {
	if h.b.cfg.Connections == nil {
		return nil, &problem{status: http.StatusNotFound, code: codeNotFound, message: "this host has no connections"}
	}
	ctx, cancel := context.WithTimeout(ctx, lookupTimeout)
	defer cancel()
	sealed, err := h.b.cfg.Connections.Connection(ctx, h.s.Org, name)
	switch {
	case errors.Is(err, run.ErrNotFound):
		return nil, &problem{status: http.StatusNotFound, code: codeNotFound, message: "the connection does not exist any more"}
	case ctx.Err() != nil && h.ctx.Err() != nil:
		return nil, errAbandoned
	case err != nil:
		h.log.Error("connection not found out", "connection", name, "error", err)
		return nil, &problem{status: http.StatusServiceUnavailable, code: codeUnavailable, message: "the connection cannot be looked up just now"}
	}
	credential, err := h.b.cfg.Sealing.Open(h.s.Org, sealed)
	if err != nil {
		h.log.Error("credential not opened", "org", h.s.Org, "connection", name, "error", err)
		return nil, &problem{status: http.StatusServiceUnavailable, code: codeUnavailable, message: "this host cannot open the connection's credential"}
	}
	o := &opened{Connection: sealed.Connection, org: h.s.Org, credential: secret.Value(credential)}
	o.scrubber = h.b.upstreams.scrubberOf(sealed.Credential, o.credential)
	return o, nil
}

// connection serves everything below /connections/<name>.
func (h *Handler) connection(w http.ResponseWriter, r *http.Request, name, path string) error {
	c, err := h.open(r.Context(), name)
	if err != nil {
		return err
	}
	if wait := h.b.upstreams.take(c); wait > 0 {
		return &problem{status: http.StatusTooManyRequests, code: codeRate, message: "the connection's rate is used up", after: int(wait/time.Second) + 1}
	}
	if c.Kind == connection.Postgres {
		return h.sql(w, r, c, path)
	}
	return h.forward(w, r, c, path)
}

// shown is a connection as a machine sees it.
type shown struct {
	Name        string          `json:"name"`
	Kind        connection.Kind `json:"kind"`
	Description string          `json:"description"`
	Methods     []string        `json:"methods,omitempty"`
	Paths       []string        `json:"paths,omitempty"`
}

// listConnections answers with what the run may use. A connection that is gone is left out.
func (h *Handler) listConnections(w http.ResponseWriter, r *http.Request) error {
	list := []shown{}
	for _, name := range h.s.Spec.Connections {
		c, err := h.open(r.Context(), name)
		var p *problem
		if errors.As(err, &p) && p.status == http.StatusNotFound {
			continue
		}
		if err != nil {
			return err
		}
		list = append(list, shown{c.Name, c.Kind, c.Description, c.Methods, c.Paths})
	}
	return writeJSON(w, map[string]any{"connections": list})
}
