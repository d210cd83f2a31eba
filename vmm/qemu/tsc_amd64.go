package qemu

import (
	"sync"
	"time"
)

// timestamp reads the processor's time stamp counter.
func timestamp() uint64

// counterRate is how often the time stamp counter counts, in kHz, measured once. An emulated processor's counts as this
// host's does.
var counterRate = sync.OnceValue(func() int {
	begin, from := pair()
	time.Sleep(200 * time.Millisecond)
	end, to := pair()
	return int(float64(to-from) / (end.Sub(begin).Seconds() * 1000))
})

// pair reads clock and counter at one moment: of some readings the one that was interrupted least.
func pair() (at time.Time, count uint64) {
	least := time.Hour
	for range 100 {
		before := time.Now()
		c := timestamp()
		if took := time.Since(before); took < least {
			least, at, count = took, before, c
		}
	}
	return at, count
}
