package run

import (
	"context"
	"errors"
	"net"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
)

func TestDialWaitsThroughARestart(t *testing.T) {
	refused := &net.OpError{Op: "dial", Err: syscall.ECONNREFUSED}
	absent := &net.OpError{Op: "dial", Err: syscall.ENOENT}
	unreachable := &net.OpError{Op: "dial", Err: syscall.EHOSTUNREACH}
	for name, c := range map[string]struct {
		fails error
		until time.Duration // from then on a server is there
		limit time.Duration // of the caller's context
		took  time.Duration
		err   error
	}{
		"there":           {limit: time.Minute},
		"restarts":        {fails: refused, until: 205 * time.Millisecond, limit: time.Second, took: 210 * time.Millisecond},
		"no socket yet":   {fails: absent, until: 5 * time.Millisecond, limit: time.Second, took: 10 * time.Millisecond},
		"gone":            {fails: refused, until: time.Hour, limit: time.Minute, took: restartTime, err: refused},
		"caller gives up": {fails: refused, until: time.Hour, limit: 95 * time.Millisecond, took: 95 * time.Millisecond, err: refused},
		"another fault":   {fails: unreachable, until: 5 * time.Millisecond, limit: time.Minute, took: 0, err: unreachable},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d := newDials(t, c.fails, c.until)
				if err := d.dial(c.limit); !errors.Is(err, c.err) {
					t.Errorf("got %v, want %v", err, c.err)
				}
				if took := time.Since(d.began); took != c.took {
					t.Errorf("took %v, want %v", took, c.took)
				}
			})
		})
	}
}

// A server that has gone for good is waited for once, not by every dial; after it was there it is waited for again.
func TestDialsWaitOnceForAServerThatIsGone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDials(t, syscall.ECONNREFUSED, 10*time.Second)
		for range 3 {
			if err := d.dial(time.Minute); !errors.Is(err, syscall.ECONNREFUSED) {
				t.Errorf("got %v", err)
			}
		}
		if took := time.Since(d.began); took != restartTime {
			t.Errorf("three dials took %v, want %v", took, restartTime)
		}
		time.Sleep(time.Until(d.back))
		if err := d.dial(time.Minute); err != nil {
			t.Error(err)
		}
		d.back = time.Now().Add(95 * time.Millisecond)
		if err := d.dial(time.Minute); err != nil {
			t.Errorf("in the next restart: %v", err)
		}
	})
}

// dials are dials of a server that cannot be dialled until it is back.
type dials struct {
	*testing.T
	restarts
	began, back time.Time
}

func newDials(t *testing.T, fails error, until time.Duration) *dials {
	d := &dials{T: t, began: time.Now(), back: time.Now().Add(until)}
	here, there := net.Pipe()
	t.Cleanup(func() { here.Close(); there.Close() })
	d.dialer = func(_ context.Context, network, addr string) (net.Conn, error) {
		if network != "unix" || addr != "/redis.sock" {
			t.Errorf("dialled %s %s", network, addr)
		}
		if time.Now().Before(d.back) {
			return nil, fails
		}
		return here, nil
	}
	return d
}

func (d *dials) dial(limit time.Duration) error {
	ctx, cancel := context.WithTimeout(d.Context(), limit)
	defer cancel()
	c, err := d.restarts.dial(ctx, "unix", "/redis.sock")
	if (c == nil) == (err == nil) {
		d.Errorf("got %v, %v", c, err)
	}
	return err
}
