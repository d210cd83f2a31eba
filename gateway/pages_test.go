package gateway

import (
	"encoding/json"
	"fmt"
	"net/http"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/ephemeral-run/ephemeral/run"
)

// pages reads the run's events after the given one as JSON, page by page.
func (l *live) pages(m member, id run.ID, after int64) (all []run.Event, pages int) {
	l.t.Helper()
	for more := true; more; pages++ {
		req, err := http.NewRequestWithContext(l.ctx, "GET", fmt.Sprintf("%s/v1/runs/%s/events?after=%d", l.url, id, after), nil)
		l.must(err)
		req.Header.Set("Authorization", "Bearer "+m.secret)
		resp, err := l.client.Do(req)
		l.must(err)
		var page eventList
		err = json.NewDecoder(resp.Body).Decode(&page)
		resp.Body.Close()
		l.must(err)
		all, after, more = append(all, page.Events...), page.NextAfter, page.NextAfter != 0
	}
	return all, pages
}

// A long timeline comes page by page as JSON, and whole as a stream, also to a reader that has a part of it.
func TestPagesOfALongTimeline(t *testing.T) {
	l := newLive(t, Config{})
	m := l.newMember("o", 1_000_000)
	r := l.create(m)
	lease := l.take()
	l.start(lease)
	const batches, each = 23, 100
	for i := range batches {
		events := make([]run.NewEvent, each)
		for j := range events {
			events[j] = run.NewEvent{Type: run.EventWeb, At: time.Now().Add(time.Duration(i*each+j) * time.Microsecond), Data: run.CallData{}}
		}
		l.must(l.store.Append(l.ctx, lease, events...))
	}
	l.settle(lease)
	all, pages := l.pages(m, r.ID, 0)
	if pages != 3 || len(all) < 2+batches*each+2 || all[len(all)-1].Type != run.EventWorkerDestroyed {
		t.Fatalf("%d pages, %d events", pages, len(all))
	}
	for i, e := range all {
		if e.Seq != int64(i+1) {
			t.Fatalf("event %d has number %d", i+1, e.Seq)
		}
	}
	for _, after := range []int64{0, 1, 1000, 1500} {
		got, err := l.follow(m, r.ID, after)
		l.must(err)
		if d := cmp.Diff(all[after:], got); d != "" {
			t.Errorf("stream after %d: %s", after, d)
		}
	}
}
