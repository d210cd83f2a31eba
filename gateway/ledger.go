package gateway

import (
	"bytes"
	"context"
	"encoding/csv"
	"fmt"
	"net/http"
	"strconv"

	"github.com/gofiber/fiber/v2"

	"github.com/ephemeral-run/ephemeral/run"
)

// Limits of statements and of the limits that can be set.
const (
	maxStatementPage = 1000
	maxQueued        = 1_000_000
	mimeCSV          = "text/csv"
)

// ledgerStore is what statements and limits ask of the run store; *run.Store has it.
type ledgerStore interface {
	Statement(ctx context.Context, org string, after int64, limit int) ([]run.Entry, error)
	LimitOrg(ctx context.Context, org string, l run.Limits) (run.Org, error)
	RetainOrg(ctx context.Context, org string, seconds int) (run.Org, error)
	imageStore
	LimitKey(ctx context.Context, id string, l run.Limits) error
	KeyLimits(ctx context.Context, id string) (run.Limits, error)
}

type (
	// statement is one page of an account's ledger.
	statement struct {
		Entries   []run.Entry `json:"entries"`
		NextAfter int64       `json:"next_after,omitempty"` // for the next page; absent on the last
	}
	// ownLimits are those that hold for a key.
	ownLimits struct {
		Org run.Limits `json:"org"`
		Key run.Limits `json:"key"`
	}
)

// getStatement answers GET /v1/account/statement.
func (s *Server) getStatement(ctx context.Context, c *fiber.Ctx, key run.Key) error {
	return s.sendStatement(ctx, c, key.Org)
}

// getOrgStatement answers GET /v1/orgs/{id}/statement.
func (s *Server) getOrgStatement(ctx context.Context, c *fiber.Ctx, _ run.Key) error {
	org, err := s.org(ctx, c)
	if err != nil {
		return err
	}
	return s.sendStatement(ctx, c, org.ID)
}

// sendStatement answers with a page of the ledger, as JSON or, where the client prefers it, as CSV. The next page has a
// link (RFC 8288) in both.
func (s *Server) sendStatement(ctx context.Context, c *fiber.Ctx, org string) error {
	if err := onlyParameters(c, "after", "limit"); err != nil {
		return err
	}
	after, err := number(c, "after", 0, 0, maxInteger)
	if err != nil {
		return err
	}
	limit, err := number(c, "limit", maxStatementPage, 1, maxStatementPage)
	if err != nil {
		return err
	}
	entries, err := s.deps.Store.Statement(ctx, org, after, int(limit))
	if err != nil {
		return err
	}
	page := statement{Entries: nonNil(entries)}
	more, err := s.entriesAfter(ctx, org, entries, int(limit))
	if err != nil {
		return err
	}
	if more {
		page.NextAfter = entries[len(entries)-1].Number
		c.Set(fiber.HeaderLink, fmt.Sprintf(`<%s?after=%d&limit=%d>; rel="next"`, c.Path(), page.NextAfter, limit))
	}
	if c.Accepts(fiber.MIMEApplicationJSON, mimeCSV) == mimeCSV {
		return sendCSV(c, entries)
	}
	return sendJSON(c, http.StatusOK, page)
}

// entriesAfter tells whether any entry comes after a page of at most limit.
func (s *Server) entriesAfter(ctx context.Context, org string, page []run.Entry, limit int) (bool, error) {
	if len(page) < limit {
		return false, nil
	}
	next, err := s.deps.Store.Statement(ctx, org, page[len(page)-1].Number, 1)
	return len(next) > 0, err
}

// sendCSV answers with the entries as CSV (RFC 4180) with a header.
func sendCSV(c *fiber.Ctx, entries []run.Entry) error {
	var b bytes.Buffer
	w := csv.NewWriter(&b)
	rows := make([][]string, 0, len(entries)+1)
	rows = append(rows, run.EntryColumns())
	for _, e := range entries {
		rows = append(rows, e.Row())
	}
	if err := w.WriteAll(rows); err != nil {
		return fmt.Errorf("write statement: %w", err)
	}
	c.Set(fiber.HeaderContentType, mimeCSV+"; charset=utf-8; header=present")
	return c.Status(http.StatusOK).Send(b.Bytes())
}

// number reads a whole number from the query.
func number(c *fiber.Ctx, name string, otherwise, least, most int64) (int64, error) {
	value := c.Query(name)
	if value == "" {
		return otherwise, nil
	}
	n, err := strconv.ParseInt(value, 10, 64)
	if err != nil || n < least || n > most {
		return 0, problem(CodeInvalidParameter, "", FieldError{name, fmt.Sprintf("must be between %d and %d", least, most)})
	}
	return n, nil
}

// getLimits answers GET /v1/account/limits.
func (s *Server) getLimits(ctx context.Context, c *fiber.Ctx, key run.Key) error {
	org, err := s.deps.Store.Org(ctx, key.Org)
	if err != nil {
		return err
	}
	own, err := s.deps.Store.KeyLimits(ctx, key.ID)
	if err != nil {
		return err
	}
	return sendJSON(c, http.StatusOK, ownLimits{Org: limitsOf(org), Key: own})
}

func limitsOf(o run.Org) run.Limits {
	return run.Limits{Concurrency: o.Concurrency, Queue: o.QueueLimit}
}

// getOrgLimits answers GET /v1/orgs/{id}/limits.
func (s *Server) getOrgLimits(ctx context.Context, c *fiber.Ctx, _ run.Key) error {
	org, err := s.org(ctx, c)
	if err != nil {
		return err
	}
	return sendJSON(c, http.StatusOK, limitsOf(org))
}

// putOrgLimits answers PUT /v1/orgs/{id}/limits.
func (s *Server) putOrgLimits(ctx context.Context, c *fiber.Ctx, _ run.Key) error {
	org, err := s.org(ctx, c)
	if err != nil {
		return err
	}
	l, err := s.readLimits(ctx, c)
	if err != nil {
		return err
	}
	if org, err = s.deps.Store.LimitOrg(ctx, org.ID, l); err != nil {
		return err
	}
	return sendJSON(c, http.StatusOK, limitsOf(org))
}

// getKeyLimits answers GET /v1/keys/{id}/limits.
func (s *Server) getKeyLimits(ctx context.Context, c *fiber.Ctx, _ run.Key) error {
	id, err := keyID(c)
	if err != nil {
		return err
	}
	l, err := s.deps.Store.KeyLimits(ctx, id)
	if err != nil {
		return err
	}
	return sendJSON(c, http.StatusOK, l)
}

// putKeyLimits answers PUT /v1/keys/{id}/limits.
func (s *Server) putKeyLimits(ctx context.Context, c *fiber.Ctx, _ run.Key) error {
	id, err := keyID(c)
	if err != nil {
		return err
	}
	l, err := s.readLimits(ctx, c)
	if err != nil {
		return err
	}
	if err := s.deps.Store.LimitKey(ctx, id, l); err != nil {
		return err
	}
	return sendJSON(c, http.StatusOK, l)
}

// keyID reads the id of an API key from the address.
func keyID(c *fiber.Ctx) (string, error) {
	id := c.Params("id")
	if !namePattern.MatchString(id) {
		return "", fmt.Errorf("key: %w", run.ErrNotFound)
	}
	return id, nil
}

// readLimits reads both limits: one that was left out must not silently become the default.
func (s *Server) readLimits(ctx context.Context, c *fiber.Ctx) (run.Limits, error) {
	concurrency, queue := int64(-1), int64(-1)
	err := s.readFields(ctx, c, func(d *decoder, name string) error {
		switch name {
		case "concurrency":
			return d.integer(name, &concurrency)
		case "queue":
			return d.integer(name, &queue)
		}
		return errUnknownField
	}, func(v *violations) {
		v.number("concurrency", concurrency, 0, maxConcurrency)
		v.number("queue", queue, 0, maxQueued)
	})
	return run.Limits{Concurrency: int(concurrency), Queue: int(queue)}, err
}
