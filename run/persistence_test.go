package run

import "testing"

func TestAskPersistence(t *testing.T) {
	f := newFixture(t)
	p, err := AskPersistence(f.ctx, server.URL())
	f.must(err)
	f.same(p, Persistence{AppendOnly: "yes", Fsync: "always", Eviction: "noeviction"})
	_, err = AskPersistence(f.ctx, "unix:///nonexistent/redis.sock")
	f.want(err, ErrUnavailable)
}
