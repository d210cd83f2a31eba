package run

import (
	"crypto/ed25519"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ephemeral-run/ephemeral/run/connection"
)

func TestConnections(t *testing.T) {
	f := newFixture(t)
	f.newOrg("o", 0, 0)
	f.newOrg("p", 0, 0)
	k, err := connection.NewKeyring(connection.NewKey())
	f.must(err)
	c, err := connection.Connection{Name: "billing", BaseURL: "https://api.example.com", Auth: connection.Auth{Type: connection.AuthBearer}}.Check()
	f.must(err)
	put := func(org string, c connection.Connection, credential *string) (connection.Sealed, error) {
		return f.UpdateConnection(f.ctx, org, c.Name, func(old *connection.Sealed) (connection.Sealed, error) { return k.Update(org, old, c, credential) })
	}
	secret := "tok-MARKER-0123"
	made, err := put("o", c, &secret)
	f.must(err)
	f.same(made.CreatedAt, f.clock.now())
	f.clock.advance(time.Second)
	c.Description = "now described"
	changed, err := put("o", c, nil)
	f.must(err)
	f.same(changed.CreatedAt, made.CreatedAt)
	f.same(changed.UpdatedAt, f.clock.now())
	got, err := f.Connection(f.ctx, "o", "billing")
	f.must(err)
	f.same(got, changed)
	opened, err := k.Open("o", got)
	f.must(err)
	f.same(opened, secret)

	_, err = f.Connection(f.ctx, "p", "billing")
	f.want(err, ErrNotFound)
	_, err = put("nobody", c, &secret)
	f.want(err, ErrNotFound)
	_, err = put("p", c, nil)
	f.want(err, connection.ErrInvalid)
	all, err := f.Connections(f.ctx, "o")
	f.must(err)
	f.same(all, []connection.Sealed{changed})
	_, err = f.Connections(f.ctx, "nobody")
	f.want(err, ErrNotFound)

	for _, key := range f.rdb.Keys(f.ctx, "*").Val() {
		dump := f.rdb.Dump(f.ctx, key).Val() + fmt.Sprint(f.rdb.HGetAll(f.ctx, key).Val())
		if strings.Contains(dump, "MARKER") {
			t.Errorf("%s holds the credential", key)
		}
	}
	f.must(f.DeleteConnection(f.ctx, "o", "billing"))
	f.want(f.DeleteConnection(f.ctx, "o", "billing"), ErrNotFound)
	f.want(f.DeleteConnection(f.ctx, "o", "b:c"), ErrNotFound)
}

// Changes at the same time all take effect, none is lost.
func TestConnectionChangesAtOnce(t *testing.T) {
	f := newFixture(t)
	f.newOrg("o", 0, 0)
	c, err := connection.Connection{Name: "c", BaseURL: "https://api.example.com"}.Check()
	f.must(err)
	var all sync.WaitGroup
	for _, letter := range "abcdefgh" {
		all.Go(func() {
			_, err := f.UpdateConnection(f.ctx, "o", "c", func(old *connection.Sealed) (connection.Sealed, error) {
				next := c
				if old != nil {
					next = old.Connection
				}
				next.Description += string(letter)
				return connection.Sealed{Connection: next}, nil
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	got, err := f.Connection(f.ctx, "o", "c")
	f.must(err)
	for _, letter := range "abcdefgh" {
		if strings.Count(got.Description, string(letter)) != 1 {
			t.Errorf("%q: the change %c is lost or there twice", got.Description, letter)
		}
	}
}

func TestTooManyConnections(t *testing.T) {
	f := newFixture(t)
	f.newOrg("o", 0, 0)
	for i := range MaxConnections + 1 {
		name := fmt.Sprintf("c%d", i)
		_, err := f.UpdateConnection(f.ctx, "o", name, func(*connection.Sealed) (connection.Sealed, error) {
			c, err := connection.Connection{Name: name, BaseURL: "https://api.example.com"}.Check()
			return connection.Sealed{Connection: c}, err
		})
		if full := i == MaxConnections; full != errors.Is(err, ErrRange) || !full && err != nil {
			t.Fatalf("connection %d: %v", i, err)
		}
	}
}

func TestReceiptKeys(t *testing.T) {
	f := newFixture(t)
	a, _, err := ed25519.GenerateKey(nil)
	f.must(err)
	b, _, err := ed25519.GenerateKey(nil)
	f.must(err)
	f.must(f.PutReceiptKey(f.ctx, "k1", a))
	f.must(f.PutReceiptKey(f.ctx, "k1", a))
	f.want(f.PutReceiptKey(f.ctx, "k1", b), ErrExists)
	keys, err := f.ReceiptKeys(f.ctx)
	f.must(err)
	if len(keys) != 1 || keys[0].ID != "k1" || keys[0].Algorithm != "Ed25519" {
		t.Errorf("%+v", keys)
	}
}
