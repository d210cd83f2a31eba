package postgres

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/ephemeral-run/ephemeral/broker/postgres/postgrestest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const password = `pw-MARKER'\0123`

// TestAgainstPostgreSQL runs everything on one real server.
func TestAgainstPostgreSQL(t *testing.T) {
	c := postgrestest.Start(t, password)
	c.Exec(t, "shop", "CREATE TABLE orders (id bigint, total numeric, paid boolean, at timestamptz, note text, doc jsonb, f float8, b bytea)",
		`INSERT INTO orders VALUES (1, 12.50, true, '2026-01-31 12:00:00+01', 'ä "quoted"', '{"a": [1, null]}', 1.5, '\x00ff'), (9007199254740993, null, false, null, null, null, 'NaN', null)`,
		"GRANT SELECT, INSERT, UPDATE, DELETE ON orders TO reader", "CREATE TABLE secrets (a text)", "CREATE SEQUENCE s", "GRANT ALL ON SEQUENCE s TO reader",
		"CREATE FUNCTION sneaky() RETURNS int LANGUAGE sql AS 'INSERT INTO orders VALUES (3) RETURNING 3'", "CREATE TABLE big AS SELECT i, repeat('x', 1000) AS pad FROM generate_series(1, 20000) i",
		"CREATE FUNCTION spin() RETURNS int LANGUAGE plpgsql AS 'BEGIN LOOP NULL; END LOOP; END'", "GRANT SELECT ON big TO reader")
	var d net.Dialer
	server := Server{Host: "127.0.0.1", Port: c.Port, Database: "shop", User: "reader", Password: password, SSLMode: "disable", Dial: d.DialContext}
	query := func(sql string, params ...any) (*Result, error) {
		r, _, err := Run(t.Context(), server, Query{SQL: sql, Params: params, MaxRows: 100, MaxBytes: 1 << 20, Timeout: 5 * time.Second})
		return r, err
	}
	t.Run("types", func(t *testing.T) {
		r, err := query("select * from orders order by id")
		if err != nil {
			t.Fatal(err)
		}
		got, err := json.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		want := `{"columns":[{"name":"id","type":"int8"},{"name":"total","type":"numeric"},{"name":"paid","type":"bool"},{"name":"at","type":"timestamptz"},{"name":"note","type":"text"},{"name":"doc","type":"jsonb"},{"name":"f","type":"float8"},{"name":"b","type":"bytea"}],` +
			`"rows":[[1,"12.50",true,"2026-01-31 11:00:00+00","ä \"quoted\"",{"a":[1,null]},1.5,"\\x00ff"],["9007199254740993",null,false,null,null,null,"NaN",null]],"row_count":2,"truncated":false}`
		if string(got) != want {
			t.Errorf("got  %s\nwant %s", got, want)
		}
	})
	t.Run("parameters", func(t *testing.T) {
		r, err := query("select id from orders where id = $1 and paid = $2 and note like $3 and $4::text is null", json.Number("1"), true, "ä%", nil)
		if err != nil || r.RowCount != 1 {
			t.Errorf("%+v, %v", r, err)
		}
		if r, err := query("select note from orders where note = $1", "' or true --"); err != nil || r.RowCount != 0 {
			t.Errorf("%+v, %v", r, err)
		}
	})
	t.Run("writing", func(t *testing.T) {
		for _, sql := range []string{"select nextval('s')", "select sneaky()", "select * from orders for share", "select lo_from_bytea(0, 'x')", "select setval('s', 5)", "select txid_current(), sneaky()"} {
			_, err := query(sql)
			var refused *StatementError
			if !errors.As(err, &refused) && !errors.Is(err, ErrNotAllowed) {
				t.Errorf("%s: %v", sql, err)
			}
		}
		if n := c.Value(t, "shop", "select count(*) from orders"); n != "2" {
			t.Errorf("%s orders", n)
		}
	})
	t.Run("behind the guard", func(t *testing.T) { behindTheGuard(t, c, server) })
	t.Run("errors", func(t *testing.T) {
		for sql, code := range map[string]string{"select * from secrets": "42501", "select nothing": "42703", "select 1/0": "22012", "select * from orders where id = $1": "08P01"} {
			_, err := query(sql)
			var refused *StatementError
			if !errors.As(err, &refused) || refused.Code != code || strings.Contains(err.Error(), "MARKER") {
				t.Errorf("%s: %v", sql, err)
			}
		}
	})
	t.Run("limits", func(t *testing.T) { limits(t, server) })
	t.Run("connecting", func(t *testing.T) { connecting(t, server) })
	if n := c.Value(t, "postgres", "select count(*) from pg_stat_activity where usename = 'reader'"); n != "0" {
		t.Errorf("%s sessions are left", n)
	}
}

// behindTheGuard gives statements to the server that the guard would refuse: the transaction refuses them as well.
func behindTheGuard(t *testing.T, c *postgrestest.Cluster, server Server) {
	q := Query{MaxRows: 10, MaxBytes: 1 << 20, Timeout: 5 * time.Second}
	for _, sql := range []string{
		"insert into orders values (5)", "with a as (insert into orders values (5) returning *) select * from a", "update orders set id = 5", "create table x (a int)", "select * into x from orders",
		"select set_config('transaction_read_only', 'off', false)", "select 1; drop table orders", "copy orders from program 'echo 5'", "explain analyze insert into orders values (5)",
	} {
		cfg, err := server.config(q)
		if err != nil {
			t.Fatal(err)
		}
		q.SQL = sql
		r, _, err := transact(t.Context(), cfg, q, nil)
		if err == nil {
			t.Errorf("%s: %+v", sql, r)
		}
	}
	if n := c.Value(t, "shop", "select count(*) from orders where id = 5"); n != "0" {
		t.Errorf("%s rows were written", n)
	}
}

func limits(t *testing.T, server Server) {
	run := func(sql string, rows int, bytes int64, timeout time.Duration) (*Result, error) {
		r, _, err := Run(t.Context(), server, Query{SQL: sql, MaxRows: rows, MaxBytes: bytes, Timeout: timeout})
		return r, err
	}
	if r, err := run("select i from big", 7, 1<<20, time.Minute); err != nil || r.RowCount != 7 || !r.Truncated {
		t.Errorf("rows: %v, %v", r, err)
	}
	if r, err := run("select i from generate_series(1, 7) i", 7, 1<<20, time.Minute); err != nil || r.RowCount != 7 || r.Truncated {
		t.Errorf("just as many rows: %v, %v", r, err)
	}
	if r, err := run("select * from big", 100_000, 50_000, time.Minute); err != nil || r.RowCount < 40 || r.RowCount > 50 || !r.Truncated {
		t.Errorf("bytes: %v", err)
	}
	if _, err := run("select repeat('x', 100000000)", 1, 1000, time.Minute); !errors.Is(err, ErrBroken) {
		t.Errorf("one huge value: %v", err)
	}
	for _, sql := range []string{"select spin()", "select count(*) from big a, big b, big c"} {
		began := time.Now()
		if _, err := run(sql, 1, 1000, 300*time.Millisecond); !errors.Is(err, ErrTimeout) || time.Since(began) > 4*time.Second {
			t.Errorf("%s: %v after %v", sql, err, time.Since(began))
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(100*time.Millisecond, cancel)
	if _, _, err := Run(ctx, server, Query{SQL: "select spin()", MaxRows: 1, MaxBytes: 1000, Timeout: time.Minute}); !errors.Is(err, context.Canceled) {
		t.Errorf("abandoned: %v", err)
	}
}

func connecting(t *testing.T, server Server) {
	for name, change := range map[string]func(*Server){
		"password": func(s *Server) { s.Password = "wrong-MARKER" }, "user": func(s *Server) { s.User = "nobody" }, "database": func(s *Server) { s.Database = "none" },
		"port": func(s *Server) { s.Port = "1" }, "TLS": func(s *Server) { s.SSLMode = "verify-full" }, "host": func(s *Server) { s.Host = "/tmp" },
		"dialler": func(s *Server) {
			s.Dial = func(context.Context, string, string) (net.Conn, error) { return nil, fmt.Errorf("no MARKER") }
		},
	} {
		s := server
		change(&s)
		_, answered, err := Run(t.Context(), s, Query{SQL: "select 1", MaxRows: 1, MaxBytes: 1000, Timeout: 5 * time.Second})
		if !errors.Is(err, ErrConnect) || answered || strings.Contains(err.Error(), "MARKER") {
			t.Errorf("%s: %v, answered %v", name, err, answered)
		}
	}
}
