package gateway

import (
	"net/http"
	"strings"
	"testing"
)

func TestMetricsOfTheCell(t *testing.T) {
	l := newLive(t, Config{})
	m := l.newMember("o", 1_000_000)
	l.create(m)
	l.start(l.take())
	l.create(m)
	resp, err := http.Get(l.adminURL + "/metrics")
	l.must(err)
	a := read(t, resp)
	for _, want := range []string{"ephemeral_queue_depth 1\n", "ephemeral_runs_leased 1\n", "ephemeral_held_micros 80000\n", "ephemeral_charged_micros_total 0\n",
		"ephemeral_queue_age_seconds 0.", "ephemeral_redis_round_trip_seconds "} {
		if !strings.Contains(a.body, want) {
			t.Errorf("no %q in\n%s", want, a.body)
		}
	}
}
