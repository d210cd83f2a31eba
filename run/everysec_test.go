package run

import (
	"context"
	"log/slog"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/ephemeral-run/ephemeral/run/redisserver"
)

// everysecLoss is how much of the end a killed Redis that syncs every second may lose: it puts off its writes for so long
// while a sync is under way.
const everysecLoss = 2 * time.Second

// With everysec a killed Redis loses the end at the most, whole steps of it, and repetition with the same key makes good.
func TestKilledRedisThatSyncsEverySecond(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	own, err := redisserver.Start(ctx, filepath.Join(t.TempDir(), "redis"), redisserver.Options{Fsync: "everysec", Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { own.Close() })
	f := newFixture(t, func(c *Config) { c.RedisURL, c.QueueLimit = own.URL(), 1_000_000 })
	f.newOrg("o", 0, 1<<40)
	type acknowledged struct {
		key string
		id  ID
		at  time.Time
	}
	var all []acknowledged
	admit := func(key string) ID {
		for {
			r, _, err := f.Admit(f.ctx, admission(key))
			if err == nil {
				return r.ID
			}
			f.want(err, ErrUnavailable)
			time.Sleep(10 * time.Millisecond)
		}
	}
	for begin := time.Now(); time.Since(begin) < everysecLoss+time.Second; {
		key := word(8)
		id := admit(key)
		all = append(all, acknowledged{key, id, time.Now()})
	}
	killed := time.Now()
	f.must(syscall.Kill(own.PID(), syscall.SIGKILL))
	lost := 0
	for _, a := range all {
		if id := admit(a.key); id != a.id {
			if lost++; killed.Sub(a.at) > everysecLoss {
				t.Errorf("the run acknowledged %v before Redis was killed is lost", killed.Sub(a.at))
			}
		} else if lost > 0 {
			t.Error("a run is lost that was acknowledged before one that is kept")
		}
	}
	f.same(f.account("o").Held, Micros(100*len(all)))
	f.balanced()
	t.Logf("%d runs acknowledged, %d lost and admitted again", len(all), lost)
}
