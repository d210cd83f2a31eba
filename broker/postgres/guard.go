// Package postgres runs one reading statement at a PostgreSQL server, within limits of time, rows and bytes. That nothing is
// written is the server's own promise, a read-only transaction; the guard in front of it refuses early and clearly, and
// refuses functions that reach beyond the database. What a role may read is the server's to say: give runs a role of their own.
package postgres

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"
)

// MaxStatement is the longest statement in bytes.
const MaxStatement = 64 << 10

// ErrNotAllowed: the statement is not one that reads, or there is more than one.
var ErrNotAllowed = errors.New("statement not allowed")

func refuse(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrNotAllowed, fmt.Sprintf(format, args...))
}

var (
	first   = []string{"select", "with", "values", "table", "show", "explain"}
	writing = []string{"insert", "update", "delete", "merge", "into"}
	// reaching are functions that read or write the server's files, reach other servers, change the session or disturb
	// others. Most need rights that a reading role has not.
	reaching = []string{"set_config", "pg_sleep", "pg_sleep_for", "pg_sleep_until", "pg_terminate_backend", "pg_cancel_backend", "pg_reload_conf",
		"pg_rotate_logfile", "pg_notify", "lo_import", "lo_export", "lo_create", "lo_creat", "lo_unlink", "lo_put", "lo_from_bytea", "lowrite",
		"pg_read_file", "pg_read_binary_file", "pg_stat_file", "pg_promote", "pg_switch_wal", "pg_create_restore_point", "pg_logical_emit_message",
		"pg_export_snapshot", "query_to_xml", "query_to_xmlschema", "query_to_xml_and_xmlschema", "cursor_to_xml", "pg_import_system_collations"}
	reachingPrefixes = []string{"dblink", "pg_ls_", "pg_advisory_", "pg_try_advisory_", "pg_file_", "pg_backup_", "pg_start_backup", "pg_stop_backup",
		"pg_replication_", "pg_create_", "pg_drop_", "pg_wal_replay", "pg_logical_slot_", "pg_stat_reset", "adminpack", "http_"}
)

// Check returns ErrNotAllowed, and why, for a statement that is not a single one that reads. It errs on the strict side: a
// column called update has to be quoted.
func Check(sql string) error {
	if len(sql) > MaxStatement || !utf8.ValidString(sql) || strings.ContainsRune(sql, 0) {
		return refuse("want at most %d bytes of UTF-8", MaxStatement)
	}
	tokens, err := scan(sql)
	if err != nil {
		return err
	}
	for len(tokens) > 0 && tokens[len(tokens)-1].text == ";" {
		tokens = tokens[:len(tokens)-1]
	}
	start := slices.IndexFunc(tokens, func(t token) bool { return t.text != "(" })
	if start < 0 || !tokens[start].word || !slices.Contains(first, tokens[start].text) {
		return refuse("want SELECT, WITH, VALUES, TABLE, SHOW or EXPLAIN")
	}
	explain := tokens[start].text == "explain"
	for _, t := range tokens {
		switch {
		case t.text == ";":
			return refuse("there is more than one statement")
		case t.word && slices.Contains(writing, t.text):
			return refuse("%s writes", strings.ToUpper(t.text))
		case t.word && explain && (t.text == "analyze" || t.text == "analyse"):
			return refuse("EXPLAIN ANALYZE runs what it explains")
		case (t.word || t.quoted) && reaches(t.text):
			return refuse("the function %s reaches beyond the database", t.text)
		}
	}
	return nil
}

func reaches(name string) bool {
	return slices.Contains(reaching, name) || slices.ContainsFunc(reachingPrefixes, func(p string) bool { return strings.HasPrefix(name, p) })
}

// token is a word in lower case, a quoted identifier without its quotes, or any other character. Strings, numbers and
// comments are none.
type token struct {
	text         string
	word, quoted bool
}

// scan reads a statement as PostgreSQL does with standard_conforming_strings on (PostgreSQL manual, 4.1).
func scan(sql string) ([]token, error) {
	var tokens []token
	for i := 0; i < len(sql); {
		c := sql[i]
		rest := sql[i:]
		var n int
		var err error
		switch {
		case c == ' ' || c >= '\t' && c <= '\r':
			n = 1
		case strings.HasPrefix(rest, "--"):
			if n = strings.IndexAny(rest, "\r\n"); n < 0 {
				n = len(rest)
			}
		case strings.HasPrefix(rest, "/*"):
			n, err = comment(rest)
		case c == '\'':
			n, err = text(rest, false)
		case (c == 'e' || c == 'E') && len(rest) > 1 && rest[1] == '\'':
			n, err = text(rest[1:], true)
			n++
		case c == '"':
			var name string
			n, name, err = identifier(rest)
			tokens = append(tokens, token{text: name, quoted: true})
		case c == '$' && !(i > 0 && wordByte(sql[i-1])):
			n, err = dollar(rest)
		case wordByte(c):
			for n = 1; n < len(rest) && (wordByte(rest[n]) || rest[n] == '$'); n++ {
			}
			word := strings.ToLower(rest[:n])
			if word == "u" && strings.HasPrefix(rest[n:], "&\"") {
				return nil, refuse("identifiers with Unicode escapes are not supported")
			}
			if c < '0' || c > '9' {
				tokens = append(tokens, token{text: word, word: true})
			} else if tail := strings.TrimLeft(word, "0123456789"); tail != "" {
				tokens = append(tokens, token{text: tail, word: true}) // "1union" is two tokens for some versions
			}
		default:
			n = 1
			tokens = append(tokens, token{text: string(c)})
		}
		if err != nil {
			return nil, err
		}
		i += n
	}
	return tokens, nil
}

func wordByte(c byte) bool {
	return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '_' || c >= 0x80
}

// comment is the length of a comment in slashes and stars, which may hold others.
func comment(s string) (int, error) {
	depth := 0
	for i := 0; i+1 < len(s); i++ {
		switch s[i : i+2] {
		case "/*":
			depth++
			i++
		case "*/":
			depth--
			i++
			if depth == 0 {
				return i + 1, nil
			}
		}
	}
	return 0, refuse("a comment does not end")
}

// text is the length of a string in single quotes.
func text(s string, escapes bool) (int, error) {
	for i := 1; i < len(s); i++ {
		switch {
		case escapes && s[i] == '\\':
			i++
		case s[i] == '\'' && i+1 < len(s) && s[i+1] == '\'':
			i++
		case s[i] == '\'':
			return i + 1, nil
		}
	}
	return 0, refuse("a string does not end")
}

// identifier is the length of a name in double quotes, and the name.
func identifier(s string) (int, string, error) {
	for i := 1; i < len(s); i++ {
		switch {
		case s[i] == '"' && i+1 < len(s) && s[i+1] == '"':
			i++
		case s[i] == '"':
			return i + 1, strings.ReplaceAll(s[1:i], `""`, `"`), nil
		}
	}
	return 0, "", refuse("a quoted identifier does not end")
}

// dollar is the length of a string in dollar quotes, or of a parameter such as $1.
func dollar(s string) (int, error) {
	end := 1
	for end < len(s) && wordByte(s[end]) {
		end++
	}
	if end == len(s) || s[end] != '$' || end > 1 && s[1] >= '0' && s[1] <= '9' {
		return end, nil
	}
	tag := s[:end+1]
	n := strings.Index(s[end+1:], tag)
	if n < 0 {
		return 0, refuse("a string in dollar quotes does not end")
	}
	return end + 1 + n + len(tag), nil
}
