package run

import (
	"context"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// maxEntries bounds one page of a statement.
const maxEntries = 1000

// EntryKind says what an entry of a ledger is.
type EntryKind string

// The kinds of entries.
const (
	EntryDeposit    EntryKind = "deposit"
	EntryCorrection EntryKind = "correction" // takes credit back
	EntryCharge     EntryKind = "charge"     // of one settled run
)

// Entry is one line of an account's ledger. Entries are never changed and never removed; an account is their sum.
type Entry struct {
	Number    int64     `json:"number"` // 1, 2, 3 ... without gaps
	At        time.Time `json:"at"`
	Kind      EntryKind `json:"kind"`
	Reference string    `json:"reference,omitempty"` // of a deposit or correction
	Run       ID        `json:"run,omitempty"`       // of a charge
	Amount    Micros    `json:"amount_micros"`       // by which the balance changed: negative for a correction or charge
	Model     Micros    `json:"model_micros"`        // the parts of a charge, positive
	Web       Micros    `json:"web_micros"`
	Compute   Micros    `json:"compute_micros"`
	Balance   Micros    `json:"balance_micros"` // after this entry
}

// EntryColumns names the columns of Row.
func EntryColumns() []string {
	return []string{"number", "at", "kind", "reference", "run", "amount_micros", "model_micros", "web_micros", "compute_micros", "balance_micros"}
}

// Row is the entry as a line of a table, e.g. of CSV: numbers in decimal, the time as in RFC 3339.
func (e Entry) Row() []string {
	row := []string{strconv.FormatInt(e.Number, 10), e.At.Format(time.RFC3339Nano), string(e.Kind), e.Reference, string(e.Run)}
	for _, m := range []Micros{e.Amount, e.Model, e.Web, e.Compute, e.Balance} {
		row = append(row, strconv.FormatInt(int64(m), 10))
	}
	return row
}

// name is what the entry is kept under.
func (e Entry) name() string {
	if e.Kind == EntryCharge {
		return "c:" + string(e.Run)
	}
	return "d:" + e.Reference
}

// Statement returns the entries of an account's ledger that come after the given number, in the order in which they were
// made, at most limit (1 to 1000; 0: 1000). Fewer than limit means that there are no more. ErrNotFound: no such
// organisation; ErrRange: a limit or number that cannot be.
func (s *Store) Statement(ctx context.Context, org string, after int64, limit int) ([]Entry, error) {
	if limit == 0 {
		limit = maxEntries
	}
	switch {
	case !validOrg(org):
		return nil, fmt.Errorf("statement of %.64q: %w", org, ErrNotFound)
	case limit < 1 || limit > maxEntries:
		return nil, fmt.Errorf("statement of %s: %d entries, want 1 to %d: %w", org, limit, maxEntries, ErrRange)
	case after < 0 || after > int64(maxMicros):
		return nil, fmt.Errorf("statement of %s: after entry %d: %w", org, after, ErrRange)
	}
	list, err := s.entries(ctx, org, after, int64(limit))
	if err == nil && len(list) == 0 {
		_, err = s.Org(ctx, org)
	}
	if err != nil {
		return nil, fmt.Errorf("statement of %s: %w", org, err)
	}
	return list, nil
}

// entries reads up to limit entries after the given number. They never change, so that two reads see the same.
func (s *Store) entries(ctx context.Context, org string, after, limit int64) ([]Entry, error) {
	order, err := s.rdb.LRange(ctx, s.keys.entries(org), after, after+limit-1).Result()
	if err != nil {
		return nil, fmt.Errorf("read entries: %w", unavailable(err))
	}
	if len(order) == 0 {
		return []Entry{}, nil
	}
	names, balances := make([]string, len(order)), make([]string, len(order))
	for i, line := range order {
		names[i], balances[i], _ = strings.Cut(line, " ")
	}
	raw, err := s.rdb.HMGet(ctx, s.keys.ledger(org), names...).Result()
	if err != nil {
		return nil, fmt.Errorf("read ledger: %w", unavailable(err))
	}
	list := make([]Entry, len(order))
	for i := range order {
		line, _ := raw[i].(string)
		n := after + int64(i) + 1
		e, ok := parseEntry(names[i], line)
		balance, err := strconv.ParseInt(balances[i], 10, 64)
		if !ok || err != nil || e.Number != n {
			return nil, &damagedEntry{number: n, name: names[i]}
		}
		e.Balance = Micros(balance)
		list[i] = e
	}
	return list, nil
}

// damagedEntry is an entry that is not what was written. What follows it cannot be trusted.
type damagedEntry struct {
	number int64
	name   string
}

func (e *damagedEntry) Error() string {
	return fmt.Sprintf("entry %d, %.220q, is damaged (see: ephemeral orgs audit)", e.number, e.name)
}

// entryPattern is one line of a ledger: "number time amount", and for a charge its parts.
var entryPattern = regexp.MustCompile(`^(\d{1,16}) (\d{1,16}) (-?\d{1,16})(?: (\d{1,16}) (\d{1,16}) (\d{1,16}))?$`)

// parseEntry reads an entry by its name, "d:<reference>" or "c:<run>", and its line.
func parseEntry(name, line string) (e Entry, ok bool) {
	m := entryPattern.FindStringSubmatch(line)
	kind, subject, _ := strings.Cut(name, ":")
	if m == nil || (kind == "c") != (m[4] != "") {
		return Entry{}, false
	}
	n := func(i int) int64 {
		v, _ := strconv.ParseInt(m[i], 10, 64) // the pattern admits numbers only; empty is 0
		return v
	}
	e = Entry{Number: n(1), At: time.UnixMicro(n(2)).UTC(), Amount: Micros(n(3)), Model: Micros(n(4)), Web: Micros(n(5)), Compute: Micros(n(6))}
	switch {
	case kind == "c" && e.Amount > 0:
		e.Kind, e.Run, e.Amount = EntryCharge, ID(subject), -e.Amount
	case kind == "d" && e.Amount > 0:
		e.Kind, e.Reference = EntryDeposit, subject
	case kind == "d" && e.Amount < 0:
		e.Kind, e.Reference = EntryCorrection, subject
	default:
		return Entry{}, false
	}
	return e, true
}
