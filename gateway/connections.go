package gateway

import (
	"context"
	"errors"
	"fmt"
	"net/http"

	"github.com/gofiber/fiber/v2"

	"github.com/ephemeral-run/ephemeral/run"
	"github.com/ephemeral-run/ephemeral/run/connection"
)

// maxListed bounds the lists of a connection while they are read; connection.Check has the rules.
const maxListed = 64

type (
	connectionList struct {
		Connections []connection.Connection `json:"connections"`
	}
	receiptKeyList struct {
		Keys []run.ReceiptKey `json:"keys"`
	}
	// connectionRequest is a connection as an administrator sends it. The credential goes in and never out.
	connectionRequest struct {
		connection.Connection
		credential *string
	}
)

// member reads one member of a connection's body.
func (q *connectionRequest) member(d *decoder, name string) error {
	var kind string
	whole := func(into *int) error {
		var n int64
		err := d.integer(name, &n)
		*into = int(n)
		return err
	}
	switch name {
	case "kind":
		err := d.text(name, &kind)
		q.Kind = connection.Kind(kind)
		return err
	case "description":
		return d.text(name, &q.Description)
	case "base_url":
		return d.text(name, &q.BaseURL)
	case "auth":
		return d.object(name, q.authMember)
	case "credential":
		q.credential = new(string)
		return d.text(name, q.credential)
	case "methods":
		return d.array(name, maxListed, listOf(&q.Methods))
	case "paths":
		return d.array(name, maxListed, listOf(&q.Paths))
	case "request_headers":
		return d.array(name, maxListed, listOf(&q.RequestHeaders))
	case "response_headers":
		return d.array(name, maxListed, listOf(&q.ResponseHeaders))
	case "max_request_bytes":
		return d.integer(name, &q.MaxRequestBytes)
	case "max_response_bytes":
		return d.integer(name, &q.MaxResponseBytes)
	case "max_rows":
		return whole(&q.MaxRows)
	case "timeout_seconds":
		return whole(&q.TimeoutSeconds)
	case "rate_per_minute":
		return whole(&q.RatePerMinute)
	}
	return errUnknownField
}

func (q *connectionRequest) authMember(d *decoder, name string) error {
	switch name {
	case "type":
		var kind string
		err := d.text("auth.type", &kind)
		q.Auth.Type = connection.AuthType(kind)
		return err
	case "name":
		return d.text("auth.name", &q.Auth.Name)
	case "user":
		return d.text("auth.user", &q.Auth.User)
	}
	return errUnknownField
}

// listOf collects the strings of an array.
func listOf(into *[]string) func(*decoder, string) error {
	return func(d *decoder, path string) error {
		var s string
		err := d.text(path, &s)
		*into = append(*into, s)
		return err
	}
}

// putConnection answers PUT /v1/orgs/{id}/connections/{name}. Without a credential the one that is there stays, as long as
// it goes to the same place in the same way.
func (s *Server) putConnection(ctx context.Context, c *fiber.Ctx, _ run.Key) error {
	org, err := s.org(ctx, c)
	if err != nil {
		return err
	}
	var q connectionRequest
	if err := s.readFields(ctx, c, q.member, func(*violations) {}); err != nil {
		return err
	}
	q.Name = c.Params("name")
	checked, err := q.Check()
	if err != nil {
		return connectionProblem(err)
	}
	stored, err := s.deps.Store.UpdateConnection(ctx, org.ID, checked.Name, func(old *connection.Sealed) (connection.Sealed, error) {
		return s.deps.Sealing.Update(org.ID, old, checked, q.credential)
	})
	if err != nil {
		return connectionProblem(err)
	}
	return sendJSON(c, http.StatusOK, stored.Connection)
}

// connectionProblem names the field of a connection that is at fault.
func connectionProblem(err error) error {
	var field *connection.FieldError
	switch {
	case errors.As(err, &field):
		return problem(CodeInvalidRequest, "", FieldError{field.Field, field.Detail})
	case errors.Is(err, connection.ErrNoKey):
		return problem(CodeNoSealingKey, "", FieldError{"credential", "cannot be sealed, or opened, with the keys of this server"})
	case errors.Is(err, connection.ErrSealBroken):
		return problem(CodeNoSealingKey, "The stored credential is damaged.", FieldError{"credential", "must be given again"})
	case errors.Is(err, run.ErrRange):
		return problem(CodeConflict, fmt.Sprintf("An organisation may have %d connections.", run.MaxConnections))
	case errors.Is(err, run.ErrChanged):
		return problem(CodeConflict, "")
	}
	return err
}

// listConnections answers GET /v1/orgs/{id}/connections.
func (s *Server) listConnections(ctx context.Context, c *fiber.Ctx, _ run.Key) error {
	org, err := s.org(ctx, c)
	if err != nil {
		return err
	}
	all, err := s.deps.Store.Connections(ctx, org.ID)
	if err != nil {
		return err
	}
	list := connectionList{Connections: []connection.Connection{}}
	for _, sealed := range all {
		list.Connections = append(list.Connections, sealed.Connection)
	}
	return sendJSON(c, http.StatusOK, list)
}

// getConnection answers GET /v1/orgs/{id}/connections/{name}.
func (s *Server) getConnection(ctx context.Context, c *fiber.Ctx, _ run.Key) error {
	org, err := s.org(ctx, c)
	if err != nil {
		return err
	}
	sealed, err := s.deps.Store.Connection(ctx, org.ID, c.Params("name"))
	if err != nil {
		return err
	}
	return sendJSON(c, http.StatusOK, sealed.Connection)
}

// deleteConnection answers DELETE /v1/orgs/{id}/connections/{name}.
func (s *Server) deleteConnection(ctx context.Context, c *fiber.Ctx, _ run.Key) error {
	org, err := s.org(ctx, c)
	if err != nil {
		return err
	}
	if err := s.deps.Store.DeleteConnection(ctx, org.ID, c.Params("name")); err != nil {
		return err
	}
	return c.SendStatus(http.StatusNoContent)
}

// receiptKeys answers GET /v1/receipt-keys.
func (s *Server) receiptKeys(ctx context.Context, c *fiber.Ctx, _ run.Key) error {
	keys, err := s.deps.Store.ReceiptKeys(ctx)
	if err != nil {
		return err
	}
	return sendJSON(c, http.StatusOK, receiptKeyList{nonNil(keys)})
}

// finder tells which connections an organisation has, and remembers what kept it from finding out.
type finder struct {
	ctx   context.Context
	store Store
	org   string
	err   error
}

// has tells whether there is the connection; also when that cannot be known, see err.
func (f *finder) has(name string) bool {
	_, err := f.store.Connection(f.ctx, f.org, name)
	if errors.Is(err, run.ErrNotFound) {
		return false
	}
	f.err = errors.Join(f.err, err)
	return true
}
