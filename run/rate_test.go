package run

import (
	"errors"
	"sync"
	"testing"
	"time"
)

// Uses that are counted together count as if each had come alone.
func TestRateOfManyAtOnce(t *testing.T) {
	f := newFixture(t)
	f.newOrg("o", 0, 1_000_000)
	_, secret, err := f.CreateKey(f.ctx, "o", "k", Member)
	f.must(err)
	const callers, each, burst = 40, 10, 150
	began := time.Now()
	var all sync.WaitGroup
	var mu sync.Mutex
	granted, remaining := 0, map[int]int{}
	for range callers {
		all.Go(func() {
			for range each {
				k, a, err := f.AuthenticateAt(f.ctx, secret, Rate{1, burst})
				mu.Lock()
				switch {
				case k.Org != "o":
					t.Errorf("key %+v, %v", k, err)
				case err == nil:
					granted++
					remaining[a.Remaining]++
				case !errors.Is(err, ErrRateLimited) || a.Remaining != 0 || a.Wait <= 0 || a.Wait > time.Second:
					t.Errorf("refused with %+v, %v", a, err)
				}
				mu.Unlock()
			}
		})
	}
	all.Wait()
	more := int(time.Since(began)/time.Second) + 1 // the rate gives one a second
	if granted < burst || granted > burst+more {
		t.Errorf("%d uses granted, want %d and at most %d more", granted, burst, more)
	}
	if len(remaining) < burst-more {
		t.Errorf("%d different allowances of %d uses: %v", len(remaining), granted, remaining)
	}
}
