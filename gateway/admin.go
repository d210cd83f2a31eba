package gateway

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"regexp"
	"strings"
	"time"

	"github.com/gofiber/fiber/v2"

	"github.com/ephemeral-run/ephemeral/run"
)

// Limits of what an administrator sends.
const (
	maxName        = 128
	maxConcurrency = 10_000
	maxCredit      = 1_000_000_000_000 // micro-dollars: a million dollars at once
)

var (
	namePattern = regexp.MustCompile(`^[a-z0-9][a-z0-9_-]{0,62}$`) // ids of organisations and keys
	refPattern  = regexp.MustCompile(`^[!-~]{1,200}$`)             // visible ASCII
)

type (
	orgList struct {
		Orgs []run.Org `json:"orgs"`
	}
	keyList struct {
		Keys []run.Key `json:"keys"`
	}
	// newKey is the only answer that ever holds a key's secret.
	newKey struct {
		run.Key
		Secret string `json:"secret"`
	}
)

// readFields reads a small JSON object; member reads one of its members. check adds what is wrong with the values.
func (s *Server) readFields(ctx context.Context, c *fiber.Ctx, member func(*decoder, string) error, check func(*violations)) error {
	body, release, err := s.readBody(ctx, c)
	if err != nil {
		return err
	}
	defer release()
	d, err := decodeObject(body, member)
	if err != nil {
		return err
	}
	if len(d.fields) > 0 {
		return problem(CodeInvalidRequest, "", d.fields...)
	}
	var v violations
	check(&v)
	if p := v.problem(); p != nil {
		return p
	}
	return nil
}

// readName reads an object that has a name and nothing else.
func (s *Server) readName(ctx context.Context, c *fiber.Ctx) (name string, err error) {
	err = s.readFields(ctx, c, func(d *decoder, field string) error {
		if field == "name" {
			return d.text(field, &name)
		}
		return errUnknownField
	}, func(v *violations) { v.name("name", name) })
	return name, err
}

// createOrg answers POST /v1/orgs. With an id the request may be repeated.
func (s *Server) createOrg(ctx context.Context, c *fiber.Ctx, _ run.Key) error {
	var o run.Org
	var concurrency int64
	err := s.readFields(ctx, c, func(d *decoder, name string) error {
		switch name {
		case "id":
			return d.text(name, &o.ID)
		case "name":
			return d.text(name, &o.Name)
		case "concurrency":
			return d.integer(name, &concurrency)
		}
		return errUnknownField
	}, func(v *violations) {
		if o.ID != "" && !namePattern.MatchString(o.ID) {
			v.invalid("id", "must have 1 to 63 of a-z, 0-9, _ and -, a letter or digit first")
		}
		v.name("name", o.Name)
		v.number("concurrency", concurrency, 0, maxConcurrency)
	})
	if err != nil {
		return err
	}
	o.Concurrency = int(concurrency)
	if o, err = s.deps.Store.CreateOrg(ctx, o); err != nil {
		return err
	}
	c.Set(fiber.HeaderLocation, "/v1/orgs/"+o.ID)
	return sendJSON(c, http.StatusCreated, o)
}

// listOrgs answers GET /v1/orgs.
func (s *Server) listOrgs(ctx context.Context, c *fiber.Ctx, _ run.Key) error {
	orgs, err := s.deps.Store.Orgs(ctx)
	if err != nil {
		return err
	}
	return sendJSON(c, http.StatusOK, orgList{nonNil(orgs)})
}

// getOrg answers GET /v1/orgs/{id}.
func (s *Server) getOrg(ctx context.Context, c *fiber.Ctx, _ run.Key) error {
	org, err := s.org(ctx, c)
	if err != nil {
		return err
	}
	return sendJSON(c, http.StatusOK, org)
}

// org reads the organisation that the address names.
func (s *Server) org(ctx context.Context, c *fiber.Ctx) (run.Org, error) {
	id := c.Params("id")
	if !namePattern.MatchString(id) {
		return run.Org{}, fmt.Errorf("organisation: %w", run.ErrNotFound)
	}
	return s.deps.Store.Org(ctx, id)
}

// credit answers POST /v1/orgs/{id}/credits. The same ref credits once; a negative amount is a correction.
func (s *Server) credit(ctx context.Context, c *fiber.Ctx, _ run.Key) error {
	org, err := s.org(ctx, c)
	if err != nil {
		return err
	}
	var amount int64
	var ref string
	err = s.readFields(ctx, c, func(d *decoder, name string) error {
		switch name {
		case "amount_micros":
			return d.integer(name, &amount)
		case "ref":
			return d.text(name, &ref)
		}
		return errUnknownField
	}, func(v *violations) {
		if amount == 0 || amount > maxCredit || amount < -maxCredit {
			v.invalid("amount_micros", "must be between %d and %d and not 0", -maxCredit, maxCredit)
		}
		if !refPattern.MatchString(ref) {
			v.invalid("ref", "must have 1 to 200 visible ASCII characters; it makes repetition harmless")
		}
	})
	if err != nil {
		return err
	}
	account, err := s.deps.Store.Credit(ctx, org.ID, run.Micros(amount), ref)
	switch {
	case errors.Is(err, run.ErrIdempotencyConflict):
		return problem(CodeIdempotencyConflict, "The ref was used for another amount.", FieldError{"ref", "was used with another amount"})
	case errors.Is(err, run.ErrInsufficientFunds):
		return problem(CodeInsufficientFunds, "The correction would take what is held or not there; nothing was changed.",
			FieldError{"amount_micros", "takes more than the account has available"})
	case err != nil:
		return err
	}
	return sendJSON(c, http.StatusOK, account)
}

// getOrgAccount answers GET /v1/orgs/{id}/account.
func (s *Server) getOrgAccount(ctx context.Context, c *fiber.Ctx, _ run.Key) error {
	org, err := s.org(ctx, c)
	if err != nil {
		return err
	}
	account, err := s.deps.Store.Account(ctx, org.ID)
	if err != nil {
		return err
	}
	return sendJSON(c, http.StatusOK, account)
}

// createKey answers POST /v1/orgs/{id}/keys. Keys made here are member keys: an administrator's key belongs to no
// organisation and is made on the host.
func (s *Server) createKey(ctx context.Context, c *fiber.Ctx, _ run.Key) error {
	org, err := s.org(ctx, c)
	if err != nil {
		return err
	}
	var name, holder, expires string
	var until time.Time
	role := string(run.Member)
	err = s.readFields(ctx, c, func(d *decoder, field string) error {
		switch field {
		case "name":
			return d.text(field, &name)
		case "role":
			return d.text(field, &role)
		case "member":
			return d.text(field, &holder)
		case "expires_at":
			return d.text(field, &expires)
		}
		return errUnknownField
	}, func(v *violations) {
		v.name("name", name)
		if expires != "" {
			var err error
			if until, err = time.Parse(time.RFC3339Nano, expires); err != nil || !until.After(time.Now()) || until.Year() > 9998 {
				v.invalid("expires_at", "must be a time in the future, like 2026-10-07T12:00:00Z")
			}
		}
		if holder != "" && !namePattern.MatchString(holder) {
			v.invalid("member", "is not the id of a member")
		}
		if role != string(run.Member) {
			v.invalid("role", "must be %s: other keys belong to no organisation", run.Member)
		}
	})
	if err != nil {
		return err
	}
	key, secret, err := s.deps.Store.CreateKey(ctx, org.ID, name, run.Member, run.ExpiresAt(until), run.OfMember(holder))
	if holder != "" && errors.Is(err, run.ErrNotFound) {
		return problem(CodeInvalidRequest, "", FieldError{"member", "is not a member of the organisation"})
	}
	if err != nil {
		return err
	}
	return sendJSON(c, http.StatusCreated, newKey{key, secret})
}

// listKeys answers GET /v1/orgs/{id}/keys.
func (s *Server) listKeys(ctx context.Context, c *fiber.Ctx, _ run.Key) error {
	org, err := s.org(ctx, c)
	if err != nil {
		return err
	}
	keys, err := s.deps.Store.Keys(ctx, org.ID)
	if err != nil {
		return err
	}
	return sendJSON(c, http.StatusOK, keyList{nonNil(keys)})
}

// revokeKey answers DELETE /v1/keys/{id}.
func (s *Server) revokeKey(ctx context.Context, c *fiber.Ctx, _ run.Key) error {
	id := c.Params("id")
	if !namePattern.MatchString(id) {
		return fmt.Errorf("key: %w", run.ErrNotFound)
	}
	if err := s.deps.Store.RevokeKey(ctx, id); err != nil {
		return err
	}
	return c.SendStatus(http.StatusNoContent)
}

// name checks a name for people.
func (v *violations) name(field, s string) {
	if strings.TrimSpace(s) == "" || len(s) > maxName || hasControl(s) {
		v.invalid(field, "must have 1 to %d bytes without control characters", maxName)
	}
}
