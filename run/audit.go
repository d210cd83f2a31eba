package run

import (
	"context"
	"fmt"
	"regexp"
	"strconv"
	"strings"
)

// maxDifferences bounds a report; one difference is enough to fail.
const maxDifferences = 100

var auditOrgScript, auditRunScript = loadScript("auditorg"), loadScript("auditrun")

// scripts lists all of them, for Open to load.
var scripts = []*script{orgScript, creditScript, keyScript, admitScript, takeScript, renewScript, requeueScript,
	startScript, appendScript, authorizeScript, captureScript, putScript, settleScript, cancelScript, reapScript,
	eraseScript, auditOrgScript, auditRunScript}

// AuditReport is what Audit found.
type AuditReport struct {
	Orgs, Runs, OpenHolds                         int
	Deposits, Balance, Held, Charged, OpenHoldSum Micros
	Accounts                                      []Account
	Differences                                   []string // empty: conservation holds
}

// Err names the first difference and says how many there are; nil when conservation holds.
func (r AuditReport) Err() error {
	if len(r.Differences) == 0 {
		return nil
	}
	return fmt.Errorf("the books do not balance, %d differences, the first: %s", len(r.Differences), r.Differences[0])
}

func (r *AuditReport) differ(format string, args ...any) {
	if len(r.Differences) < maxDifferences {
		r.Differences = append(r.Differences, fmt.Sprintf(format, args...))
	}
}

// Audit recomputes every account from the ledger's entries and the runs' records, and every run's money from its calls,
// and reports what differs:
//   - deposits are the sum of the deposit entries, charges of the charge entries, balance = deposits - charges, and no
//     entry is missing from their sequence;
//   - held is the sum of the holds of runs that have not ended, and available is not negative;
//   - of each run: 0 <= charged + pending <= reserved, charged = model + web + compute = its captured calls, pending = its
//     unfinished calls; an ended one has charged + released = reserved, nothing pending, and exactly its charge in the
//     ledger; one that has not ended is in the queue or leased, never both.
//
// It may run while the cell works: each account and each run is read as of one moment. The error is ErrUnavailable;
// differences are in the report.
//
// Scripts auditorg.lua and auditrun.lua.
func (s *Store) Audit(ctx context.Context) (AuditReport, error) {
	ids, err := s.rdb.ZRange(ctx, s.keys.orgs(), 0, -1).Result()
	if err != nil {
		return AuditReport{}, fmt.Errorf("audit: list organisations: %w", unavailable(err))
	}
	rep := AuditReport{Orgs: len(ids)}
	for _, org := range ids {
		if err := s.auditOrg(ctx, org, &rep); err != nil {
			return AuditReport{}, fmt.Errorf("audit %s: %w", org, err)
		}
		if err := s.auditRuns(ctx, org, &rep); err != nil {
			return AuditReport{}, fmt.Errorf("audit %s: %w", org, err)
		}
	}
	return rep, nil
}

// auditOrg checks one account against its ledger and open holds.
func (s *Store) auditOrg(ctx context.Context, org string, rep *AuditReport) error {
	prefix, suffix := s.keys.runAround()
	r, err := s.eval(ctx, auditOrgScript, []string{s.keys.org(org), s.keys.queue(org), s.keys.active(org)}, prefix, suffix)
	if err != nil {
		return err
	}
	if r.code() == "NOTFOUND" {
		rep.differ("organisation %s is listed and has no account", org)
		return nil
	}
	var v [7]int64
	for i, name := range []string{"balance", "held", "deposits", "charged", "entries", "open holds", "sum of open holds"} {
		if v[i], err = r.int(i + 1); err != nil {
			rep.differ("account %s: %s is no number: %.40q", org, name, r.text(i+1))
			return nil
		}
	}
	a := Account{Org: org, Balance: Micros(v[0]), Held: Micros(v[1]), Available: Micros(v[0] - v[1]), Deposits: Micros(v[2]), Charged: Micros(v[3])}
	rep.Accounts = append(rep.Accounts, a)
	rep.Balance, rep.Held, rep.Deposits, rep.Charged = rep.Balance+a.Balance, rep.Held+a.Held, rep.Deposits+a.Deposits, rep.Charged+a.Charged
	rep.OpenHolds, rep.OpenHoldSum = rep.OpenHolds+int(v[5]), rep.OpenHoldSum+Micros(v[6])
	sums, err := s.sumLedger(ctx, org, v[4], rep)
	if err != nil {
		return err
	}
	check := func(what string, is, want Micros) {
		if is != want {
			rep.differ("account %s: %s is %d micro-dollars, by the records it is %d", org, what, is, want)
		}
	}
	check("deposits", a.Deposits, sums.deposits)
	check("charged", a.Charged, sums.charges)
	check("balance", a.Balance, sums.deposits-sums.charges)
	check("held", a.Held, Micros(v[6]))
	if a.Available < 0 {
		rep.differ("account %s: available is negative: %d micro-dollars", org, a.Available)
	}
	return nil
}

type ledgerSums struct{ deposits, charges Micros }

// entry is one line of a ledger: "number time amount", and for a charge its split.
type entry struct {
	number, at          int64
	amount              Micros
	model, web, compute Micros
}

var entryPattern = regexp.MustCompile(`^(\d{1,16}) (\d{1,16}) (-?\d{1,16})(?: (\d{1,16}) (\d{1,16}) (\d{1,16}))?$`)

func parseEntry(raw string) (e entry, ok bool) {
	m := entryPattern.FindStringSubmatch(raw)
	if m == nil {
		return entry{}, false
	}
	n := func(i int) int64 {
		v, _ := strconv.ParseInt(m[i], 10, 64) // the pattern admits numbers only; empty is 0
		return v
	}
	return entry{number: n(1), at: n(2), amount: Micros(n(3)), model: Micros(n(4)), web: Micros(n(5)), compute: Micros(n(6))}, true
}

// sumLedger adds up the entries up to the given number, each of which must be there once; later ones were made meanwhile.
func (s *Store) sumLedger(ctx context.Context, org string, count int64, rep *AuditReport) (sums ledgerSums, err error) {
	seen := map[int64]string{} // entries by their number
	var cursor uint64
	for {
		list, next, err := s.rdb.HScan(ctx, s.keys.ledger(org), cursor, "", 1000).Result()
		if err != nil {
			return sums, fmt.Errorf("read ledger: %w", unavailable(err))
		}
		for i := 0; i+1 < len(list); i += 2 {
			e, ok := parseEntry(list[i+1])
			kind, _, _ := strings.Cut(list[i], ":")
			if !ok || (kind != "d" && kind != "c") || e.amount < 0 && kind == "c" {
				rep.differ("ledger %s: entry %.80q is damaged", org, list[i])
				continue
			}
			if e.number > count || seen[e.number] == list[i] { // a scan may show an entry twice
				continue
			}
			if first := seen[e.number]; first != "" {
				rep.differ("ledger %s: entries %.80q and %.80q have the same number", org, first, list[i])
			}
			seen[e.number] = list[i]
			if kind == "d" {
				sums.deposits += e.amount
			} else {
				sums.charges += e.amount
			}
		}
		if cursor = next; cursor == 0 {
			break
		}
	}
	if int64(len(seen)) != count {
		rep.differ("ledger %s: %d of %d entries are there", org, len(seen), count)
	}
	return sums, nil
}
