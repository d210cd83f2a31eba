package postgres

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
)

// Query is one statement with its limits.
type Query struct {
	SQL      string
	Params   []any // strings, numbers, booleans and nil, as JSON gives them
	MaxRows  int
	MaxBytes int64 // of the rows as JSON
	Timeout  time.Duration
}

// Column is one column of a result.
type Column struct {
	Name string `json:"name"`
	Type string `json:"type"`
}

// Result is what a statement gave.
type Result struct {
	Columns   []Column            `json:"columns"`
	Rows      [][]json.RawMessage `json:"rows"`
	RowCount  int                 `json:"row_count"`
	Truncated bool                `json:"truncated"` // there were more rows or bytes than allowed
}

// Server is where to connect to.
type Server struct {
	Host, Port, Database, User, Password string
	SSLMode                              string // disable, require, verify-ca or verify-full
	Dial                                 func(ctx context.Context, network, address string) (net.Conn, error)
}

// StatementError is the server's refusal of a statement. Its text is the server's.
type StatementError struct {
	Code    string // SQLSTATE
	Message string
}

// Error is the server's message with its code.
func (e *StatementError) Error() string { return e.Message + " (SQLSTATE " + e.Code + ")" }

// What can go wrong beside ErrNotAllowed and a *StatementError. Texts are safe to show.
var (
	ErrConnect = errors.New("the database could not be reached or refused the connection")
	ErrBroken  = errors.New("the database broke the connection off")
	ErrTimeout = errors.New("the statement took too long")
)

const (
	maxParams  = 64
	endTimeout = time.Second
)

// Run connects, runs the statement in a read-only transaction, and disconnects. answered tells whether the server let it in.
func Run(ctx context.Context, s Server, q Query) (r *Result, answered bool, err error) {
	if err := Check(q.SQL); err != nil {
		return nil, false, err
	}
	params, err := encode(q.Params)
	if err != nil {
		return nil, false, err
	}
	cfg, err := s.config(q)
	if err != nil {
		return nil, false, err
	}
	ctx, cancel := context.WithTimeout(ctx, q.Timeout)
	defer cancel()
	return transact(ctx, cfg, q, params)
}

// transact runs the statement, whatever it is, in a read-only transaction of a session of its own.
func transact(ctx context.Context, cfg *pgconn.Config, q Query, params [][]byte) (r *Result, answered bool, err error) {
	conn, err := pgconn.ConnectConfig(ctx, cfg)
	if err != nil {
		return nil, false, reason(ctx, err, ErrConnect)
	}
	defer disconnect(conn)
	if err := conn.Exec(ctx, "BEGIN TRANSACTION READ ONLY").Close(); err != nil {
		return nil, true, reason(ctx, err, ErrBroken)
	}
	r, err = read(ctx, conn, q, params)
	if err != nil {
		return nil, true, reason(ctx, err, ErrBroken)
	}
	return r, true, nil
}

// disconnect ends a connection, and with it whatever the server still does for it.
func disconnect(conn *pgconn.PgConn) {
	ctx, cancel := context.WithTimeout(context.Background(), endTimeout)
	defer cancel()
	if conn.IsBusy() {
		_ = conn.CancelRequest(ctx) // the server notices the end anyway, but later
		_ = conn.Conn().Close()
	}
	_ = conn.Close(ctx) // it is over either way
	select {
	case <-conn.CleanupDone():
	case <-ctx.Done():
	}
}

// config is made of what the connection says alone: no environment, no password file, no service file.
func (s Server) config(q Query) (*pgconn.Config, error) {
	port, err := strconv.ParseUint(s.Port, 10, 16)
	if err != nil {
		return nil, errors.New("the port makes no sense")
	}
	cfg, err := pgconn.ParseConfig(fmt.Sprintf("host=%s port=%d user=x dbname=x sslmode=%s passfile=/dev/null sslcert='' sslkey='' sslrootcert='' target_session_attrs=any",
		quote(s.Host), port, quote(s.SSLMode)))
	if err != nil {
		return nil, errors.New("the connection's address makes no sense") // the parser's error shows it whole
	}
	cfg.User, cfg.Password, cfg.Database = s.User, s.Password, s.Database
	cfg.Fallbacks = nil
	cfg.DialFunc = s.Dial
	// The name goes to the dialler as it is: it resolves it and checks the address that it dials.
	cfg.LookupFunc = func(_ context.Context, host string) ([]string, error) { return []string{host}, nil }
	cfg.MaxProtocolMessageBodyLen = int(q.MaxBytes) + 64<<10
	ms := strconv.FormatInt(q.Timeout.Milliseconds(), 10)
	cfg.RuntimeParams = map[string]string{
		"application_name": "ephemeral", "default_transaction_read_only": "on", "standard_conforming_strings": "on", "client_encoding": "UTF8",
		"statement_timeout": ms, "lock_timeout": ms, "idle_in_transaction_session_timeout": ms, "DateStyle": "ISO", "IntervalStyle": "iso_8601", "TimeZone": "UTC",
	}
	return cfg, nil
}

func quote(s string) string {
	return "'" + strings.NewReplacer(`\`, `\\`, `'`, `\'`).Replace(s) + "'"
}

// encode writes parameters as PostgreSQL's text; the server finds their types.
func encode(params []any) ([][]byte, error) {
	if len(params) > maxParams {
		return nil, fmt.Errorf("%w: at most %d parameters", ErrNotAllowed, maxParams)
	}
	out := make([][]byte, len(params))
	for i, p := range params {
		switch p := p.(type) {
		case nil:
		case string:
			out[i] = []byte(p)
		case bool:
			out[i] = strconv.AppendBool(nil, p)
		case json.Number:
			out[i] = []byte(p)
		case float64:
			out[i] = strconv.AppendFloat(nil, p, 'g', -1, 64)
		default:
			return nil, fmt.Errorf("%w: parameter %d is no text, number or boolean", ErrNotAllowed, i+1)
		}
	}
	return out, nil
}

// read runs the statement by the extended protocol, in which a message holds one statement, and reads rows within the limits.
func read(ctx context.Context, conn *pgconn.PgConn, q Query, params [][]byte) (*Result, error) {
	rows := conn.ExecParams(ctx, q.SQL, params, nil, nil, nil)
	r := &Result{Columns: []Column{}, Rows: [][]json.RawMessage{}}
	var bytes int64
	types := pgtype.NewMap()
	for rows.NextRow() {
		if len(r.Rows) == q.MaxRows {
			r.Truncated = true
			break
		}
		row, size := cells(rows)
		if bytes += size; bytes > q.MaxBytes {
			r.Truncated = true
			break
		}
		r.Rows = append(r.Rows, row)
	}
	for _, f := range rows.FieldDescriptions() {
		r.Columns = append(r.Columns, Column{Name: f.Name, Type: typeName(types, f.DataTypeOID)})
	}
	r.RowCount = len(r.Rows)
	if r.Truncated {
		return r, nil // the rest is not read: the connection ends
	}
	_, err := rows.Close()
	return r, err
}

func typeName(m *pgtype.Map, oid uint32) string {
	if t, ok := m.TypeForOID(oid); ok {
		return t.Name
	}
	return "oid " + strconv.FormatUint(uint64(oid), 10)
}

// cells are the values of the current row as JSON, and how many bytes they have.
func cells(rows *pgconn.ResultReader) (row []json.RawMessage, size int64) {
	fields := rows.FieldDescriptions()
	for i, v := range rows.Values() {
		c := cell(fields[i].DataTypeOID, v)
		size += int64(len(c)) + 1
		row = append(row, c)
	}
	return row, size + 2
}

// maxExact is the greatest whole number that every JSON reader holds exactly.
const maxExact = 1 << 53

// cell is one value: of PostgreSQL's text form what JSON can hold exactly, else the text.
func cell(oid uint32, v []byte) json.RawMessage {
	if v == nil {
		return json.RawMessage("null")
	}
	switch oid {
	case pgtype.BoolOID:
		if string(v) == "t" {
			return json.RawMessage("true")
		}
		return json.RawMessage("false")
	case pgtype.Int2OID, pgtype.Int4OID, pgtype.Int8OID:
		if n, err := strconv.ParseInt(string(v), 10, 64); err == nil && n <= maxExact && n >= -maxExact {
			return json.RawMessage(strconv.FormatInt(n, 10))
		}
	case pgtype.Float4OID, pgtype.Float8OID, pgtype.JSONOID, pgtype.JSONBOID:
		if json.Valid(v) {
			return append(json.RawMessage(nil), v...)
		}
	}
	out, err := json.Marshal(strings.ToValidUTF8(string(v), "\uFFFD"))
	if err != nil {
		return json.RawMessage("null") // a valid string always encodes
	}
	return out
}

// reason is what a caller may know of an error: others show addresses and users.
func reason(ctx context.Context, err, otherwise error) error {
	var refused *pgconn.PgError
	switch {
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		return ErrTimeout
	case ctx.Err() != nil:
		return ctx.Err()
	case errors.As(err, &refused) && otherwise != ErrConnect:
		if refused.Code == "57014" {
			return ErrTimeout
		}
		message := strings.ToValidUTF8(refused.Message, "")
		if !utf8.ValidString(message) || len(message) > 1000 {
			message = message[:min(len(message), 1000)]
		}
		return &StatementError{Code: refused.Code, Message: strings.ToValidUTF8(message, "")}
	}
	return fmt.Errorf("%w: %w", otherwise, hide{err})
}

// hide keeps an error's identity, for errors.Is, and not its text.
type hide struct{ err error }

func (h hide) Error() string { return "see the connection's definition" }
func (h hide) Unwrap() error { return h.err }
