package main

import (
	"context"
	"errors"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

func TestBilling(t *testing.T) {
	h := billing("token")
	for _, c := range []struct {
		method, path, token string
		status              int
		part                string
	}{
		{"GET", "/invoices?status=open", "token", 200, `"id":"inv-1003"`},
		{"GET", "/invoices/inv-1005", "token", 200, `"amount_cents":150000`},
		{"GET", "/invoices/inv-9", "token", 404, "no such invoice"},
		{"GET", "/customers", "token", 200, `["Aster Books","Birch \u0026 Sons","Cedar Café","Dune Travel"]`},
		{"POST", "/invoices", "token", 405, ""},
		{"GET", "/invoices", "", 401, "token"},
		{"GET", "/invoices", "other", 401, "token"},
	} {
		w, r := httptest.NewRecorder(), httptest.NewRequest(c.method, c.path, nil)
		if c.token != "" {
			r.Header.Set("Authorization", "Bearer "+c.token)
		}
		if h.ServeHTTP(w, r); w.Code != c.status || !strings.Contains(w.Body.String(), c.part) {
			t.Errorf("%s %s: %d %s", c.method, c.path, w.Code, w.Body)
		}
	}
	w, r := httptest.NewRecorder(), httptest.NewRequest("GET", "/invoices?status=open", nil)
	r.Header.Set("Authorization", "Bearer token")
	if h.ServeHTTP(w, r); strings.Contains(w.Body.String(), "paid") {
		t.Errorf("paid ones among the open: %s", w.Body)
	}
}

// TestUpstreams runs the whole program's work against a double of "ephemeral connections put", and uses what it configured.
func TestUpstreams(t *testing.T) {
	open, err := os.MkdirTemp("", "upstreams") // PostgreSQL may have to enter it as another user
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(open) })
	if err := os.Chmod(open, 0o755); err != nil {
		t.Fatal(err)
	}
	put := filepath.Join(open, "put")
	script := "#!/bin/sh\ncat > " + open + "/$4.credential && echo \"$*\" > " + open + "/$4.put\n"
	if err := os.WriteFile(put, []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- run(ctx, put, "org_x", filepath.Join(open, "database")) }()
	read := func(name string) string {
		for until := time.Now().Add(time.Minute); time.Now().Before(until); time.Sleep(20 * time.Millisecond) {
			select {
			case err := <-done:
				t.Fatalf("it has ended: %v", err)
			default:
			}
			if b, err := os.ReadFile(filepath.Join(open, name)); err == nil && len(b) > 0 {
				return strings.TrimSpace(string(b))
			}
		}
		t.Fatalf("no %s", name)
		return ""
	}
	flag := func(line, name string) string {
		_, rest, _ := strings.Cut(line, name+" ")
		value, _, _ := strings.Cut(rest, " ")
		return value
	}
	line := read("billing.put")
	if !strings.HasPrefix(line, "connections put org_x billing --credential-file - ") {
		t.Errorf("%s", line)
	}
	req, err := http.NewRequest("GET", flag(line, "--base-url")+"/customers", nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+read("billing.credential"))
	resp, err := http.DefaultClient.Do(req)
	if err != nil || resp.StatusCode != http.StatusOK {
		t.Fatalf("%v, %v", resp, err)
	}
	resp.Body.Close()
	if all, err := filepath.Glob("/usr/lib/postgresql/*/bin/postgres"); err != nil || len(all) == 0 {
		t.Log("PostgreSQL is not installed: scripts/setup installs it")
	} else {
		checkDatabase(t, flag(read("warehouse.put"), "--base-url"), read("warehouse.credential"))
	}
	stop()
	if err := <-done; err != nil {
		t.Error(err)
	}
	if conn, err := net.DialTimeout("tcp", req.URL.Host, time.Second); err == nil {
		conn.Close()
		t.Error("it still listens")
	}
}

func checkDatabase(t *testing.T, url, password string) {
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	conn, err := pgconn.Connect(ctx, strings.Replace(url, "reader@", "reader:"+password+"@", 1))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.WithoutCancel(ctx))
	r := conn.ExecParams(ctx, "SELECT count(*) FROM orders", nil, nil, nil, nil).Read()
	if r.Err != nil || string(r.Rows[0][0]) != "600" {
		t.Errorf("%v, %v", r.Rows, r.Err)
	}
	for _, sql := range []string{"DELETE FROM orders", "CREATE TABLE x (y int)", "SELECT pg_read_file('/etc/passwd')"} {
		var refused *pgconn.PgError
		if _, err := conn.Exec(ctx, sql).ReadAll(); !errors.As(err, &refused) || refused.Code != "42501" {
			t.Errorf("%s: %v", sql, err)
		}
	}
}
