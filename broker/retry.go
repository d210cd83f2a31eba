package broker

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"net/http"
	"strconv"
	"time"
)

// How long the broker waits between attempts.
const (
	firstPause = 500 * time.Millisecond
	mostPause  = 8 * time.Second
	mostAsked  = 60 * time.Second // a provider that asks for more will not be back in time
)

// pause waits before the next attempt. It returns false when there is no time for it: the call's deadline comes first, or
// nobody waits any more.
func (c *call) pause(ctx context.Context, attempt int, asked time.Duration) bool {
	if asked > mostAsked {
		return false
	}
	d := max(backOff(attempt, firstPause, mostPause), asked)
	if deadline, ok := ctx.Deadline(); ok && time.Until(deadline) <= d {
		return false
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(c.guest, cancel)()
	return c.h.b.sleep(ctx, d) == nil
}

// backOff doubles from first up to most, and takes between half and all of that.
func backOff(n int, first, most time.Duration) time.Duration {
	d := most
	if n < 20 {
		d = min(first<<(n-1), most)
	}
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails
	return d/2 + time.Duration(binary.LittleEndian.Uint64(b[:])%uint64(d/2+1))
}

// retryAfter reads the header of that name: seconds or a date. Zero is nothing asked.
func retryAfter(h http.Header) time.Duration {
	v := h.Get("Retry-After")
	if s, err := strconv.ParseInt(v, 10, 64); err == nil {
		return time.Duration(min(max(s, 0), 1<<20)) * time.Second
	}
	if at, err := http.ParseTime(v); err == nil {
		return max(time.Until(at), 0)
	}
	return 0
}
