package run

import (
	"testing"
	"time"
)

func TestStatement(t *testing.T) {
	f := newFixture(t)
	l := f.started(1000) // deposits 1,000,000
	f.must(second(f.Authorize(f.ctx, l, Call{ID: "m", Kind: KindModel, Min: 1, Max: 500})))
	f.must(f.Capture(f.ctx, l, "m", 300))
	f.must(second(f.Authorize(f.ctx, l, Call{ID: "c", Kind: KindCompute, Min: 200, Max: 200})))
	f.must(f.Capture(f.ctx, l, "c", 200))
	f.clock.advance(time.Second)
	f.must(second(f.Credit(f.ctx, "o", -400, "mistake")))
	f.must(second(f.Settle(f.ctx, l, Outcome{State: Succeeded})))
	at := f.clock.now()
	f.must(second(f.Credit(f.ctx, "o", 7, "gift=1")))
	f.must(second(f.Credit(f.ctx, "o", 7, "gift=1")))
	want := []Entry{
		{Number: 1, At: at.Add(-time.Second), Kind: EntryDeposit, Reference: "start", Amount: 1_000_000, Balance: 1_000_000},
		{Number: 2, At: at, Kind: EntryCorrection, Reference: "mistake", Amount: -400, Balance: 999_600},
		{Number: 3, At: at, Kind: EntryCharge, Run: l.Run, Amount: -500, Model: 300, Compute: 200, Balance: 999_100},
		{Number: 4, At: at, Kind: EntryDeposit, Reference: "gift=1", Amount: 7, Balance: 999_107},
	}
	for after := range len(want) + 1 {
		for limit := 1; limit <= 5; limit++ {
			got, err := f.Statement(f.ctx, "o", int64(after), limit)
			f.must(err)
			f.same(got, append([]Entry{}, want[after:min(after+limit, len(want))]...))
		}
	}
	f.same(f.account("o").Balance, want[3].Balance)
	// A run that costs nothing is no entry.
	f.admit("o", 100)
	f.must(second(f.Settle(f.ctx, f.take(), Outcome{State: Failed})))
	got, err := f.Statement(f.ctx, "o", 0, 0)
	f.must(err)
	f.same(len(got), 4)
	f.balanced()

	f.newOrg("empty", 0, 0)
	got, err = f.Statement(f.ctx, "empty", 0, 0)
	f.must(err)
	f.same(got, []Entry{})
	for _, org := range []string{"nobody", "No/Body"} {
		_, err = f.Statement(f.ctx, org, 0, 0)
		f.want(err, ErrNotFound)
	}
	for _, bad := range [][2]int{{-1, 1}, {0, -1}, {0, 1001}} {
		_, err = f.Statement(f.ctx, "o", int64(bad[0]), bad[1])
		f.want(err, ErrRange)
	}
}

func FuzzParseEntry(f *testing.F) {
	f.Add("d:ref", "1 2 3")
	f.Add("d:ref", "1 2 -3")
	f.Add("c:run_0", "1 2 3 1 1 1")
	f.Fuzz(func(t *testing.T, name, line string) {
		e, ok := parseEntry(name, line)
		if !ok {
			return
		}
		if e.name() != name || e.Amount == 0 || (e.Kind == EntryDeposit) != (e.Amount > 0) || e.Model < 0 || e.Number < 0 {
			t.Errorf("%q %q: %+v", name, line, e)
		}
	})
}
