package run

import (
	"context"
	"errors"
	"io/fs"
	"net"
	"sync"
	"syscall"
	"time"
)

const (
	// restartTime is how long dials wait for a server that has gone: one that restarts is there before that, and nobody
	// notices. The client otherwise believes its first failed dials, and looks again once a second.
	restartTime = 500 * time.Millisecond
	redialEvery = 10 * time.Millisecond
)

type dialer func(ctx context.Context, network, addr string) (net.Conn, error)

// restarts dials a server that may restart.
type restarts struct {
	dialer

	mu   sync.Mutex
	gone time.Time // when nobody was found to listen any more; zero: somebody does
}

// dial dials again while nobody listens at the address, until nobody has for restartTime, or ctx ends. Any other failure,
// and the last refusal, are the caller's.
func (r *restarts) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	for {
		c, err := r.dialer(ctx, network, addr)
		if !r.again(err) {
			return c, err
		}
		select {
		case <-ctx.Done():
			return nil, err
		case <-time.After(redialEvery):
		}
	}
}

// again tells of the end of a dial whether another one may do better.
func (r *restarts) again(err error) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case err == nil:
		r.gone = time.Time{}
		return false
	case !nobodyListens(err):
		return false
	case r.gone.IsZero():
		r.gone = time.Now()
	}
	return time.Since(r.gone) < restartTime
}

// nobodyListens tells whether a dial failed for want of a server: its port or socket is closed, or its socket is not there.
func nobodyListens(err error) bool {
	return errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, fs.ErrNotExist)
}
