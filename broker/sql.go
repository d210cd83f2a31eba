package broker

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"

	"github.com/ephemeral-run/ephemeral/broker/outbound"
	"github.com/ephemeral-run/ephemeral/broker/postgres"
	"github.com/ephemeral-run/ephemeral/run"
	"github.com/ephemeral-run/ephemeral/run/connection"
)

// sqlRequest is the body of POST /connections/<name>/sql.
type sqlRequest struct {
	SQL     string `json:"sql"`
	Params  []any  `json:"params"`
	MaxRows int    `json:"max_rows"`
}

// sql serves a connection of kind postgres.
func (h *Handler) sql(w http.ResponseWriter, r *http.Request, c *opened, path string) error {
	if path != "/sql" {
		return &problem{status: http.StatusNotFound, code: codeNotFound, message: "this connection answers /sql only"}
	}
	if r.Method != http.MethodPost {
		w.Header().Set("Allow", http.MethodPost)
		return &problem{status: http.StatusMethodNotAllowed, code: codeMethod, message: "want POST"}
	}
	var req sqlRequest
	data, err := readBody(w, r, c.MaxRequestBytes, h.b.bodyTimeout)
	if err != nil {
		return err
	}
	if err := strictJSON(data, &req); err != nil {
		return invalid("", "the body makes no sense: %v", err)
	}
	if req.MaxRows < 0 {
		return invalid("max_rows", "must not be negative")
	}
	if err := postgres.Check(req.SQL); err != nil {
		return &problem{status: http.StatusForbidden, code: codeSQLNotAllowed, param: "sql", message: err.Error()}
	}
	return h.query(w, r, c, req)
}

func (h *Handler) query(w http.ResponseWriter, r *http.Request, c *opened, req sqlRequest) error {
	server, err := h.b.server(c)
	if err != nil {
		return fmt.Errorf("connection %s: %w", c.Name, err)
	}
	rows := c.MaxRows
	if req.MaxRows > 0 {
		rows = min(rows, req.MaxRows)
	}
	ctx, cancel := h.during(r.Context(), c.Timeout())
	defer cancel()
	o, err := h.outward(ctx, run.EventConnection, run.CallData{Kind: string(connection.Postgres), Target: c.Name, Method: "SQL"}, h.b.prices.Calls.SQL)
	if err != nil {
		return err
	}
	result, answered, err := postgres.Run(ctx, server, postgres.Query{
		SQL: req.SQL, Params: req.Params, MaxRows: rows, MaxBytes: c.MaxResponseBytes, Timeout: c.Timeout(),
	})
	if err != nil {
		p := h.sqlFailed(c, err)
		o.done(answered, 0, 0, p.code)
		return p
	}
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(result); err != nil {
		o.done(true, 0, 0, codeUpstream)
		return fmt.Errorf("encode rows: %w", err)
	}
	o.done(true, http.StatusOK, int64(b.Len()), "")
	if c.scrubber.Hidden(b.Bytes()) {
		return &problem{status: http.StatusBadGateway, code: codeWithheld, message: errReveals.Error()}
	}
	return writeJSON(w, json.RawMessage(c.scrubber.Scrub(b.Bytes())))
}

// server is where a connection of kind postgres leads to.
func (b *Broker) server(c *opened) (postgres.Server, error) {
	u, err := url.Parse(c.BaseURL)
	if err != nil {
		return postgres.Server{}, errors.New("the base URL is no URL")
	}
	s := postgres.Server{
		Host: u.Hostname(), Port: u.Port(), Database: u.Path[1:], User: u.User.Username(), Password: string(c.credential),
		SSLMode: u.Query().Get("sslmode"), Dial: b.dialer.DialContext,
	}
	if s.Port == "" {
		s.Port = "5432"
	}
	if s.SSLMode == "" {
		s.SSLMode = "verify-full"
	}
	return s, nil
}

// sqlFailed is the guest's answer to a statement that failed.
func (h *Handler) sqlFailed(c *opened, err error) *problem {
	var refused *postgres.StatementError
	switch {
	case errors.As(err, &refused):
		message := c.scrubber.Scrub([]byte(refused.Error()))
		if c.scrubber.Hidden(message) {
			message = []byte("the statement was refused")
		}
		return &problem{status: http.StatusUnprocessableEntity, code: codeSQL, message: string(message)}
	case errors.Is(err, postgres.ErrNotAllowed):
		return &problem{status: http.StatusForbidden, code: codeSQLNotAllowed, message: err.Error()}
	case errors.Is(err, outbound.ErrAddress):
		return &problem{status: http.StatusForbidden, code: codeAddress, message: "the connection's address must not be reached from here"}
	case errors.Is(err, postgres.ErrTimeout):
		return &problem{status: http.StatusGatewayTimeout, code: codeUpstreamSlow, message: postgres.ErrTimeout.Error()}
	case errors.Is(err, postgres.ErrConnect):
		h.log.Warn("connection failed", "connection", c.Name, "reason", postgres.ErrConnect.Error())
		return &problem{status: http.StatusBadGateway, code: codeUpstream, message: postgres.ErrConnect.Error()}
	case errors.Is(err, postgres.ErrBroken):
		return &problem{status: http.StatusBadGateway, code: codeUpstream, message: postgres.ErrBroken.Error()}
	}
	return errAbandoned
}
