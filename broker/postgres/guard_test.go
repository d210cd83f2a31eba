package postgres

import (
	"errors"
	"strings"
	"testing"
)

var reading = []string{
	"select 1", "SELECT 1;", "  select 1 ; ; ", "(select 1) union (select 2)", "with a as (select 1) select * from a", "values (1), (2)", "table orders",
	"show server_version", "explain select 1", "select 'insert; delete'", "select $$drop; update$$", "select $a$ $$ ; $a$", "select \"update\" from t",
	"select 1 -- ; delete", "select /* ; /* delete */ */ 1", "select e'a\\'; delete'", "select 'it''s; delete'", "select * from t where a = $1 and b = $2",
	"select created_at, updated_at, deleted from t", "select a::text[1] from t", "select 1 as analyze", "select 'ä' as \"ü\"", "select E'\\\\' ; ",
}

var refused = []string{
	"", ";", "insert into t values (1)", "update t set a = 1", "delete from t", "drop table t", "truncate t", "copy t to '/tmp/x'", "copy t to program 'id'",
	"set transaction read write", "begin", "commit", "rollback; drop table t", "do $$ begin end $$", "call p()", "listen a", "vacuum", "grant all on t to x",
	"select 1; select 2", "select 1; drop table t", "select 'a'; drop table t; --'", "select $$a$$; drop table t", "select 1 /* */ ; drop table t", "select e'\\''; drop table t; --'",
	"with a as (insert into t values (1) returning *) select * from a", "with a as (delete from t returning *) select 1", "WITH a AS (UPDATE t SET a=1 RETURNING *) SELECT 1",
	"select * into new from t", "select 1 for update", "explain analyze select 1", "explain (analyze) select 1", "EXPLAIN (ANALYSE true) SELECT 1", "explain insert into t values (1)",
	"select pg_sleep(100)", "select PG_SLEEP(1)", "select pg_catalog.pg_sleep(1)", "select \"pg_sleep\"(1)", "select set_config('statement_timeout', '0', false)", "select pg_read_file('/etc/passwd')",
	"select pg_ls_dir('/')", "select lo_import('/etc/passwd')", "select * from dblink('host=x', 'select 1') as t(a int)", "select pg_terminate_backend(1)", "select pg_advisory_lock(1)",
	"select pg_notify('a', 'b')", "select query_to_xml('delete from t', true, true, '')", "select 'open", "select /* open", "select \"open", "select $a$ open $$",
	"select u&\"p\\0067_sleep\"(1)", "select U&\"p\\0067_sleep\"(1)", "select 1\x00", "select \xff", "select " + strings.Repeat("1", 70_000), "merge into t using s on true when matched then delete",
	"prepare a as select 1", "execute a", "declare c cursor for select 1", "fetch all from c", "lock table t", "reset all", "load 'x'", "refresh materialized view v", "import foreign schema s from server x into y",
	"select 1into t", "1", "'select'", "-- select\ndrop table t", "explain execute a; drop table t",
}

func TestGuard(t *testing.T) {
	for _, s := range reading {
		if err := Check(s); err != nil {
			t.Errorf("%q: %v", s, err)
		}
	}
	for _, s := range refused {
		if err := Check(s); !errors.Is(err, ErrNotAllowed) {
			t.Errorf("%.80q: %v", s, err)
		}
	}
}

// FuzzGuard: what passes has no second statement outside of strings and comments, however it is padded, and passes again
// with white space around it.
func FuzzGuard(f *testing.F) {
	for _, s := range append(reading, refused...) {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if Check(s) != nil {
			return
		}
		if len(s) < MaxStatement-100 {
			if err := Check("\n " + s + "\n"); err != nil {
				t.Fatalf("%q passes, and not with white space around it: %v", s, err)
			}
		}
		for _, tail := range []string{"\n; drop table t", "\n;select 1", "\n;delete from t", "\n/**/;--\nselect 1"} {
			if len(s) < MaxStatement-100 && Check(s+tail) == nil {
				t.Fatalf("%q passes with %q behind it", s, tail)
			}
		}
	})
}
