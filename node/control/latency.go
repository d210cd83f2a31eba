package control

import (
	"slices"
	"sync"
	"time"

	"github.com/ephemeral-run/ephemeral/run/pools"
	"github.com/ephemeral-run/ephemeral/vmm/pool"
)

// lately is how many of the last claims, and of the last restores, latencies are taken of.
const lately = 512

// Latencies remembers how long the last claims and restores of a pool took, and tells Next of them. Its zero value is ready
// but for Next, which must not be nil.
type Latencies struct {
	Next pool.Observer

	mu              sync.Mutex
	claims, restore window
}

var _ pool.Observer = (*Latencies)(nil)

// Claimed implements pool.Observer.
func (l *Latencies) Claimed(wait, age time.Duration, ready bool) {
	l.mu.Lock()
	l.claims.add(wait)
	l.mu.Unlock()
	l.Next.Claimed(wait, age, ready)
}

// Made implements pool.Observer. Restores that failed took as long as they took, and are left out.
func (l *Latencies) Made(took time.Duration, err error) {
	if err == nil {
		l.mu.Lock()
		l.restore.add(took)
		l.mu.Unlock()
	}
	l.Next.Made(took, err)
}

// report is what a node says of them; nil where nothing has happened yet.
func (l *Latencies) report() (claim, restore *pools.Latency) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.claims.latency(), l.restore.latency()
}

// window has the last values.
type window struct {
	values []time.Duration
	next   int // the one to replace, once there are as many as are kept
}

func (w *window) add(d time.Duration) {
	if len(w.values) < lately {
		w.values = append(w.values, d)
		return
	}
	w.values[w.next] = d
	w.next = (w.next + 1) % lately
}

func (w *window) latency() *pools.Latency {
	n := len(w.values)
	if n == 0 {
		return nil
	}
	sorted := slices.Sorted(slices.Values(w.values))
	at := func(percent int) float64 { return sorted[max(0, (n*percent+99)/100-1)].Seconds() } // nearest rank
	return &pools.Latency{Count: n, P50: at(50), P95: at(95), P99: at(99), Max: sorted[n-1].Seconds()}
}
