package run

import (
	"context"
	"errors"
	"fmt"
)

// maxDifferences bounds a report; one difference is enough to fail.
const maxDifferences = 100

var auditOrgScript, auditRunScript = loadLax("auditorg"), loadLax("auditrun")

// scripts lists all of them, for Open to load.
var scripts = []*script{authenticateScript, readScript, orgScript, retainOrgScript, creditScript, keyScript, admitScript, takeScript, renewScript, requeueScript,
	startScript, appendScript, authorizeScript, captureScript, putScript, settleScript, cancelScript, reapScript,
	eraseScript, uploadScript, uploadPutScript, uploadKeepScript, uploadDropScript, uploadFreeScript, limitOrgScript, limitKeyScript, shareScript, signUpScript, auditOrgScript, auditRunScript}

// AuditReport is what Audit found.
type AuditReport struct {
	Orgs, Runs, OpenHolds                         int
	Deposits, Balance, Held, Charged, OpenHoldSum Micros
	Accounts                                      []Account
	Differences                                   []string // empty: conservation holds

	trial Micros // trial credit in the ledgers
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
//   - deposits are the sum of the deposit entries, charges of the charge entries, balance = deposits - charges, no entry is
//     missing from their sequence, and each left the balance that those before it and itself add up to;
//   - held is the sum of the holds of runs that have not ended, and available is not negative;
//   - the trial credit in the ledgers is what was given out of its pot;
//   - of each run: 0 <= charged + pending <= reserved, charged = model + web + compute = its captured calls, pending = its
//     unfinished calls; an ended one has charged + released = reserved, nothing pending, and exactly its charge in the
//     ledger; one that has not ended is in the queue or leased, never both.
//
// It may run while the cell works: each account and each run is read as of one moment. The error is ErrUnavailable;
// differences are in the report.
//
// Scripts auditorg.lua and auditrun.lua.
func (s *Store) Audit(ctx context.Context) (AuditReport, error) {
	before, err := s.TrialGiven(ctx)
	if err != nil {
		return AuditReport{}, fmt.Errorf("audit: %w", err)
	}
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
	after, err := s.TrialGiven(ctx)
	if err != nil {
		return AuditReport{}, fmt.Errorf("audit: %w", err)
	}
	if rep.trial < before || rep.trial > after { // people may sign up meanwhile
		rep.differ("trial credit: the ledgers have %d micro-dollars of it, %d were given", rep.trial, after)
	}
	return rep, nil
}

// auditOrg checks one account against its ledger and open holds.
func (s *Store) auditOrg(ctx context.Context, org string, rep *AuditReport) error {
	prefix, suffix := s.keys.runAround()
	r, err := s.eval(ctx, auditOrgScript, []string{s.keys.org(org), s.keys.queue(org), s.keys.active(org),
		s.keys.ledger(org), s.keys.entries(org), s.keys.parked(org)}, prefix, suffix)
	if err != nil {
		return err
	}
	if r.code() == "NOTFOUND" {
		rep.differ("organisation %s is listed and has no account", org)
		return nil
	}
	var v [9]int64
	for i, name := range []string{"balance", "held", "deposits", "charged", "entries", "open holds", "sum of open holds",
		"entries by name", "entries in order"} {
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
	if v[7] != v[4] || v[8] != v[4] {
		rep.differ("ledger %s: %d entries were made, %d are there by name and %d in order", org, v[4], v[7], v[8])
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

// sumLedger adds up the entries up to the given number, in order; later ones were made meanwhile. It stops at the first
// that is missing, damaged or leaves another balance than it should.
func (s *Store) sumLedger(ctx context.Context, org string, count int64, rep *AuditReport) (sums ledgerSums, err error) {
	for n := int64(0); n < count; {
		page, err := s.entries(ctx, org, n, min(maxEntries, count-n))
		if err != nil {
			var bad *damagedEntry
			if errors.As(err, &bad) {
				rep.differ("ledger %s: %v", org, bad)
				return sums, nil
			}
			return sums, err
		}
		if len(page) == 0 {
			rep.differ("ledger %s: entry %d of %d is missing", org, n+1, count)
			return sums, nil
		}
		for _, e := range page {
			if e.Kind == EntryCharge {
				sums.charges -= e.Amount
			} else {
				sums.deposits += e.Amount
				if e.Reference == trialRef {
					rep.trial += e.Amount
				}
			}
			if balance := sums.deposits - sums.charges; e.Balance != balance {
				rep.differ("ledger %s: after entry %d, %s, the balance is %d micro-dollars, by the entries so far it is %d",
					org, e.Number, e.name(), e.Balance, balance)
				return sums, nil
			}
		}
		n += int64(len(page))
	}
	return sums, nil
}
