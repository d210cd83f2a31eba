package gateway

import "testing"

func TestQueues(t *testing.T) {
	l := newLive(t, Config{})
	if queues, total, err := l.admin.Queues(l.ctx); err != nil || len(queues) != 0 || total != 0 {
		t.Errorf("%v, %d, %v", queues, total, err)
	}
	busy, calm := l.newMember("busy", 1_000_000), l.newMember("calm", 1_000_000)
	l.newMember("idle", 1_000_000)
	l.create(calm)
	l.start(l.take())
	l.create(busy)
	l.create(busy)
	queues, total, err := l.admin.Queues(l.ctx)
	l.must(err)
	if total != 2 || len(queues) != 2 {
		t.Fatalf("%d: %+v", total, queues)
	}
	if q := queues[0]; q.Org != "busy" || q.Queued != 2 || q.Parked != 0 || q.Leased != 0 || q.Oldest <= 0 || q.Oldest > 60 {
		t.Errorf("%+v", q)
	}
	if q := queues[1]; q.Org != "calm" || q.Queued != 0 || q.Leased != 1 || q.Oldest != 0 {
		t.Errorf("%+v", q)
	}
	a := l.do(t, "GET", "/v1/queues", "", "Authorization", "Bearer "+busy.secret)
	if p := a.problem(t); p.Code != CodeForbidden {
		t.Errorf("a member sees queues: %+v", p)
	}
}
