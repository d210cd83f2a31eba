package run

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/ephemeral-run/ephemeral/run/connection"
)

// MaxConnections is how many connections an organisation may have.
const MaxConnections = 256

var connectionScript = loadScript("connection")

// Connection returns an organisation's connection as it is stored, its credential sealed. ErrNotFound: there is none.
func (s *Store) Connection(ctx context.Context, org, name string) (connection.Sealed, error) {
	c, _, err := s.readConnection(ctx, org, name)
	return c, err
}

// readConnection also returns the stored text, for a change that must not overwrite another.
func (s *Store) readConnection(ctx context.Context, org, name string) (c connection.Sealed, text string, err error) {
	if !validOrg(org) || !connection.ValidName(name) {
		return c, "", fmt.Errorf("connection %.64q of %.64q: %w", name, org, ErrNotFound)
	}
	text, err = s.rdb.HGet(ctx, s.keys.connections(org), name).Result()
	if missing(err) {
		return c, "", fmt.Errorf("connection %s of %s: %w", name, org, ErrNotFound)
	}
	if err != nil {
		return c, "", fmt.Errorf("read connection %s of %s: %w", name, org, unavailable(err))
	}
	if c, err = decodeConnection(text); err != nil {
		return c, "", fmt.Errorf("connection %s of %s: %w", name, org, err)
	}
	return c, text, nil
}

func decodeConnection(text string) (connection.Sealed, error) {
	var c connection.Sealed
	if err := json.Unmarshal([]byte(text), &c); err != nil {
		return c, fmt.Errorf("stored connection: %w", err)
	}
	return c, nil
}

// Connections returns an organisation's connections by name. ErrNotFound: no such organisation.
func (s *Store) Connections(ctx context.Context, org string) ([]connection.Sealed, error) {
	if _, err := s.Org(ctx, org); err != nil {
		return nil, err
	}
	texts, err := s.rdb.HGetAll(ctx, s.keys.connections(org)).Result()
	if err != nil {
		return nil, fmt.Errorf("list connections of %s: %w", org, unavailable(err))
	}
	all := make([]connection.Sealed, 0, len(texts))
	for _, name := range slices.Sorted(maps.Keys(texts)) {
		c, err := decodeConnection(texts[name])
		if err != nil {
			return nil, fmt.Errorf("connection %s of %s: %w", name, org, err)
		}
		all = append(all, c)
	}
	return all, nil
}

// UpdateConnection replaces an organisation's connection, or makes it: change gets what is there (nil: nothing) and returns
// what is to be. It may be called again when another change came first. ErrNotFound: no such organisation; ErrRange: it has
// MaxConnections already. Times of creation and change are set here.
//
// Script connection.lua.
func (s *Store) UpdateConnection(ctx context.Context, org, name string, change func(old *connection.Sealed) (connection.Sealed, error)) (connection.Sealed, error) {
	const attempts = 10
	for n := 1; ; n++ {
		c, err := s.tryUpdate(ctx, org, name, change)
		if err == nil || n == attempts || !errors.Is(err, ErrChanged) {
			return c, err
		}
	}
}

func (s *Store) tryUpdate(ctx context.Context, org, name string, change func(*connection.Sealed) (connection.Sealed, error)) (connection.Sealed, error) {
	if _, err := s.Org(ctx, org); err != nil {
		return connection.Sealed{}, err
	}
	found, text, err := s.readConnection(ctx, org, name)
	var old *connection.Sealed
	switch {
	case err == nil:
		old = &found
	case !errors.Is(err, ErrNotFound):
		return connection.Sealed{}, err
	}
	c, err := change(old)
	if err != nil {
		return connection.Sealed{}, err
	}
	if c.Name != name {
		return connection.Sealed{}, fmt.Errorf("connection %s of %s becomes %.64q: %w", name, org, c.Name, ErrRange)
	}
	c.UpdatedAt = s.now().UTC()
	c.CreatedAt = c.UpdatedAt
	if old != nil {
		c.CreatedAt = old.CreatedAt
	}
	encoded, err := json.Marshal(c)
	if err != nil {
		return connection.Sealed{}, fmt.Errorf("encode connection %s of %s: %w", name, org, err)
	}
	if err := s.setConnection(ctx, org, name, string(encoded), text); err != nil {
		return connection.Sealed{}, fmt.Errorf("put connection %s of %s: %w", name, org, err)
	}
	return c, nil
}

// DeleteConnection removes an organisation's connection, and with it the sealed credential. ErrNotFound: there is none.
//
// Script connection.lua.
func (s *Store) DeleteConnection(ctx context.Context, org, name string) error {
	if !validOrg(org) || !connection.ValidName(name) {
		return fmt.Errorf("connection %.64q of %.64q: %w", name, org, ErrNotFound)
	}
	if err := s.setConnection(ctx, org, name, "", "*"); err != nil {
		return fmt.Errorf("delete connection %s of %s: %w", name, org, err)
	}
	return nil
}

func (s *Store) setConnection(ctx context.Context, org, name, text, old string) error {
	r, err := s.eval(ctx, connectionScript, []string{s.keys.org(org), s.keys.connections(org)}, name, text, MaxConnections, old)
	if err != nil {
		return err
	}
	return refused(r)
}
