package gateway

import (
	"crypto/ed25519"
	"encoding/base64"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/ephemeral-run/ephemeral/client"
	"github.com/ephemeral-run/ephemeral/run"
	"github.com/ephemeral-run/ephemeral/run/connection"
)

func TestConnectionsAPI(t *testing.T) {
	l := newLive(t, Config{})
	org, err := l.store.CreateOrg(l.ctx, run.Org{Name: "o"})
	if err != nil {
		t.Fatal(err)
	}
	secret := "tok-MARKER-0123456789"
	def := connection.Connection{Name: "billing", BaseURL: "https://api.example.com", Auth: connection.Auth{Type: connection.AuthBearer}, Paths: []string{"/v1/**"}}
	made, err := l.admin.PutConnection(l.ctx, org.ID, client.ConnectionRequest{Connection: def, Credential: &secret})
	if err != nil || !made.HasCredential || made.Kind != connection.HTTP || fmt.Sprint(made.Methods) != "[GET HEAD]" {
		t.Fatalf("%+v, %v", made, err)
	}
	def.Description = "Invoices"
	if made, err = l.admin.PutConnection(l.ctx, org.ID, client.ConnectionRequest{Connection: def}); err != nil || !made.HasCredential {
		t.Fatalf("the credential was not kept: %+v, %v", made, err)
	}
	sealed, err := l.store.Connection(l.ctx, org.ID, "billing")
	if err != nil {
		t.Fatal(err)
	}
	if got, err := l.deps.Sealing.Open(org.ID, sealed); err != nil || got != secret {
		t.Errorf("%q, %v", got, err)
	}
	all, err := l.admin.Connections(l.ctx, org.ID)
	if err != nil || len(all) != 1 || all[0].Description != "Invoices" {
		t.Errorf("%+v, %v", all, err)
	}
	one, err := l.admin.Connection(l.ctx, org.ID, "billing")
	if err != nil || one.Name != "billing" || strings.Contains(fmt.Sprintf("%+v %+v", one, all), "MARKER") {
		t.Errorf("%+v, %v", one, err)
	}
	if err := l.admin.DeleteConnection(l.ctx, org.ID, "billing"); err != nil {
		t.Error(err)
	}
	_, err = l.admin.Connection(l.ctx, org.ID, "billing")
	connectionRefused(t, err, CodeNotFound, "")
	if strings.Contains(l.log.String(), "MARKER") {
		t.Error("the log shows the credential")
	}
}

// connectionRefused checks the problem that the server answered with.
func connectionRefused(t *testing.T, err error, code Code, field string) {
	t.Helper()
	var p *client.Problem
	if !errors.As(err, &p) || p.Code != string(code) || field != "" && (len(p.Errors) != 1 || p.Errors[0].Field != field) {
		t.Errorf("got %v, want %s at %q", err, code, field)
	}
	if err != nil && strings.Contains(err.Error(), "MARKER") {
		t.Errorf("the problem shows the credential: %v", err)
	}
}

func TestConnectionsRefused(t *testing.T) {
	l := newLive(t, Config{})
	org, err := l.store.CreateOrg(l.ctx, run.Org{Name: "o"})
	l.must(err)
	secret, short := "tok-MARKER-0123456789", "MARKER"
	good := connection.Connection{Name: "c", BaseURL: "https://api.example.com", Auth: connection.Auth{Type: connection.AuthBearer}}
	put := func(change func(*connection.Connection), credential *string) error {
		c := good
		change(&c)
		_, err := l.admin.PutConnection(l.ctx, org.ID, client.ConnectionRequest{Connection: c, Credential: credential})
		return err
	}
	same := func(*connection.Connection) {}
	connectionRefused(t, put(same, nil), CodeInvalidRequest, "credential")
	connectionRefused(t, put(same, &short), CodeInvalidRequest, "credential")
	connectionRefused(t, put(func(c *connection.Connection) { c.BaseURL = "https://u:MARKER@api.example.com" }, &secret), CodeInvalidRequest, "base_url")
	connectionRefused(t, put(func(c *connection.Connection) { c.Paths = []string{"/a/../b"} }, &secret), CodeInvalidRequest, "paths[0]")
	connectionRefused(t, put(func(c *connection.Connection) { c.Name = "C" }, &secret), CodeInvalidRequest, "name")
	l.must(put(same, &secret))
	connectionRefused(t, put(func(c *connection.Connection) { c.BaseURL = "https://evil.example" }, nil), CodeInvalidRequest, "credential")
	_, err = l.admin.PutConnection(l.ctx, "nobody", client.ConnectionRequest{Connection: good, Credential: &secret})
	connectionRefused(t, err, CodeNotFound, "")
	m := l.newMember("p", 1_000_000)
	_, err = m.Connections(l.ctx, org.ID)
	connectionRefused(t, err, CodeForbidden, "")
}

// TestRunsNameConnections admits runs that name connections of their organisation, and no other.
func TestRunsNameConnections(t *testing.T) {
	l := newLive(t, Config{})
	m, other := l.newMember("p", 1_000_000), l.newMember("q", 1_000_000)
	for _, c := range []struct{ org, name string }{{"p", "billing"}, {"q", "theirs"}} {
		_, err := l.admin.PutConnection(l.ctx, c.org, client.ConnectionRequest{Connection: connection.Connection{Name: c.name, BaseURL: "https://api.example.com"}})
		l.must(err)
	}
	request := func(names ...string) client.Request {
		return client.Request{Prompt: "p", Web: true, Connections: names}
	}
	_, err := m.CreateRun(l.ctx, request("billing"), client.CreateOptions{})
	l.must(err)
	for _, name := range []string{"theirs", "gone", "Billing", "a/b"} {
		_, err := m.CreateRun(l.ctx, request("billing", name), client.CreateOptions{})
		connectionRefused(t, err, CodeUnknownConnection, "connections[1]")
	}
	_, err = other.CreateRun(l.ctx, request("billing"), client.CreateOptions{})
	connectionRefused(t, err, CodeUnknownConnection, "connections[0]")
}

func TestReceiptKeysAPI(t *testing.T) {
	l := newLive(t, Config{})
	m := l.newMember("p", 1_000_000)
	public, _, err := ed25519.GenerateKey(nil)
	l.must(err)
	l.must(l.store.PutReceiptKey(l.ctx, "k", public))
	keys, err := m.ReceiptKeys(l.ctx)
	if err != nil || len(keys) != 1 || keys[0].Public != base64.StdEncoding.EncodeToString(public) {
		t.Errorf("%+v, %v", keys, err)
	}
}
