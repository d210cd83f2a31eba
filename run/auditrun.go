package run

import (
	"context"
	"regexp"
	"strconv"
)

// auditRuns checks the money of every run of an organisation that is still kept.
func (s *Store) auditRuns(ctx context.Context, org string, rep *AuditReport) error {
	for cursor := ""; ; {
		ids, err := s.idsBefore(ctx, org, Page{Cursor: cursor}, maxPage)
		if err != nil {
			return err
		}
		keys := make([][]string, len(ids))
		for i, id := range ids {
			keys[i] = []string{s.keys.run(id), s.keys.calls(id), s.keys.queue(org), s.keys.active(org), s.keys.ledger(org), s.keys.leases(),
				s.keys.parked(org)}
		}
		replies, err := s.evalMany(ctx, auditRunScript, keys, ids)
		if err != nil {
			return err
		}
		for i, id := range ids {
			s.auditRun(org, id, replies[i], rep)
			cursor = id
		}
		if len(ids) < maxPage {
			return nil
		}
	}
}

// auditRun checks one run by the answer of auditrun.lua.
func (s *Store) auditRun(org, id string, r reply, rep *AuditReport) {
	if r.code() == "NOTFOUND" {
		// The record has expired; its charge stays in the ledger.
		e, ok := parseEntry("c:"+id, r.text(1))
		if ok && s.now().Sub(e.At) < s.cfg.Retention {
			rep.differ("run %s: charged %d micro-dollars, and its record is gone before its time", id, -e.Amount)
		}
		return
	}
	rep.Runs++
	b := book{org: org, id: id, f: r.fields(1), rep: rep}
	b.read()
	b.checkCalls(r.fields(2))
	b.checkHold()
	if State(b.f["state"]).Terminal() {
		b.checkEnded(r.text(3))
	} else {
		b.checkOpen(r.text(3), r.text(4) == "1", r.text(5) == "1", r.text(6) == "1")
	}
}

// book is one run's money under audit.
type book struct {
	org, id string
	f       map[string]string
	rep     *AuditReport

	reserved, charged, pending, released Micros
	kinds                                map[Kind]Micros
}

func (b *book) differ(format string, args ...any) {
	b.rep.differ("run %s: "+format, append([]any{b.id}, args...)...)
}

func (b *book) read() {
	d := decoder{f: b.f}
	b.reserved, b.charged, b.pending = d.money("reserved"), d.money("charged"), d.money("pending")
	b.kinds = map[Kind]Micros{KindModel: d.money("model"), KindWeb: d.money("web"), KindCompute: d.money("compute")}
	if State(b.f["state"]).Terminal() {
		b.released = d.money("released")
	}
	if d.err != nil {
		b.differ("%v", d.err)
	}
	if b.f["org"] != b.org {
		b.differ("belongs to %.64q and is listed under %s", b.f["org"], b.org)
	}
}

var callRecord = regexp.MustCompile(`^([pcv]) (model|web|compute) (\d{1,16}) (\d{1,16})$`)

// checkCalls compares the record with the calls that were authorised, captured and void.
func (b *book) checkCalls(calls map[string]string) {
	captured, pending := map[Kind]Micros{}, Micros(0)
	for call, raw := range calls {
		m := callRecord.FindStringSubmatch(raw)
		if m == nil {
			b.differ("call %.128q is damaged", call)
			continue
		}
		granted, _ := strconv.ParseInt(m[3], 10, 64) // the pattern admits numbers only
		amount, _ := strconv.ParseInt(m[4], 10, 64)
		if amount > granted {
			b.differ("call %.128q was granted %d micro-dollars and charged %d", call, granted, amount)
		}
		captured[Kind(m[2])] += Micros(amount)
		if m[1] == "p" {
			pending += Micros(granted)
		}
	}
	for _, kind := range []Kind{KindModel, KindWeb, KindCompute} {
		if b.kinds[kind] != captured[kind] {
			b.differ("%s is %d micro-dollars, by its calls it is %d", kind, b.kinds[kind], captured[kind])
		}
	}
	if b.pending != pending {
		b.differ("pending is %d micro-dollars, by its calls it is %d", b.pending, pending)
	}
}

// checkHold checks what holds in every state.
func (b *book) checkHold() {
	if split := b.kinds[KindModel] + b.kinds[KindWeb] + b.kinds[KindCompute]; b.charged != split {
		b.differ("charged is %d micro-dollars, its parts are %d", b.charged, split)
	}
	if b.charged < 0 || b.pending < 0 || b.charged+b.pending > b.reserved {
		b.differ("hold of %d micro-dollars, charged %d, pending %d", b.reserved, b.charged, b.pending)
	}
}

// checkEnded checks a settled run against its ledger entry.
func (b *book) checkEnded(raw string) {
	if b.pending != 0 || b.charged+b.released != b.reserved {
		b.differ("ended, reserved %d micro-dollars, charged %d, released %d, pending %d", b.reserved, b.charged, b.released, b.pending)
	}
	e, ok := parseEntry("c:"+b.id, raw)
	switch {
	case raw == "" && b.charged == 0:
	case raw == "":
		b.differ("charged %d micro-dollars, and the ledger has no entry", b.charged)
	case !ok:
		b.differ("its ledger entry is damaged")
	case -e.Amount != b.charged || e.Model != b.kinds[KindModel] || e.Web != b.kinds[KindWeb] || e.Compute != b.kinds[KindCompute]:
		b.differ("charged %d micro-dollars, by the ledger it is %d", b.charged, -e.Amount)
	}
}

// checkOpen checks that a run that has not ended is where its state says.
func (b *book) checkOpen(raw string, queued, active, leased bool) {
	if raw != "" {
		b.differ("state %s, and the ledger has charged it", b.f["state"])
	}
	waiting := State(b.f["state"]) == Queued
	if queued != waiting || active == waiting || leased == waiting {
		b.differ("state %s, in the queue: %t, active: %t, leased: %t", b.f["state"], queued, active, leased)
	}
}
