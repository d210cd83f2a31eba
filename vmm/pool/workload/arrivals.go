package workload

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"strconv"
	"strings"
	"time"
)

// Process is an arrival process: Start gives a function whose calls return the times of the arrivals, in order, from the
// start of the process. It returns false after the last.
type Process interface {
	Start(r *rand.Rand) func() (time.Duration, bool)
	Rate() float64 // mean arrivals a second, over long times
	String() string
}

// mostRate bounds arrivals a second; a nanosecond clock could not tell more apart.
const mostRate = 1e6

// Poisson arrivals come independently of each other, so many a second.
type Poisson float64

// ParsePoisson reads a rate, arrivals a second.
func ParsePoisson(s string) (Poisson, error) {
	rate, err := parseRate(s)
	if err == nil && rate == 0 {
		err = errors.New("the rate must be above 0")
	}
	return Poisson(rate), err
}

// Start implements Process.
func (p Poisson) Start(r *rand.Rand) func() (time.Duration, bool) {
	now := 0.0
	return func() (time.Duration, bool) {
		now += r.ExpFloat64() / float64(p)
		return seconds(now), true
	}
}

// Rate implements Process.
func (p Poisson) Rate() float64 { return float64(p) }

func (p Poisson) String() string { return fmt.Sprintf("poisson:%g", float64(p)) }

// Bursty is a Markov-modulated Poisson process of two states, each of which lasts an exponential time.
type Bursty struct {
	Low, High float64       // arrivals a second between bursts and in them
	On, Off   time.Duration // mean length of a burst and of the time between two
}

// ParseBursty reads LOW,HIGH,ON,OFF: two rates a second, the mean length of a burst and of the time between bursts.
func ParseBursty(s string) (b Bursty, err error) {
	f := strings.Split(s, ",")
	if len(f) != 4 {
		return b, errors.New("want LOW,HIGH,ON,OFF, for example 0.5,20,10s,2m")
	}
	var errs [4]error
	b.Low, errs[0] = parseRate(f[0])
	b.High, errs[1] = parseRate(f[1])
	b.On, errs[2] = ParseDuration(f[2])
	b.Off, errs[3] = ParseDuration(f[3])
	if err := errors.Join(errs[:]...); err != nil {
		return b, err
	}
	if b.High <= 0 || b.On <= 0 || b.Off <= 0 {
		return b, errors.New("the rate of bursts, their length and the time between them must be above 0")
	}
	return b, nil
}

// Start implements Process.
func (b Bursty) Start(r *rand.Rand) func() (time.Duration, bool) {
	now, burst := 0.0, false
	until := r.ExpFloat64() * b.Off.Seconds()
	return func() (time.Duration, bool) {
		for {
			rate := b.Low
			if burst {
				rate = b.High
			}
			if rate > 0 {
				// Without memory: what was left of the gap when the state changed may be drawn anew.
				if next := now + r.ExpFloat64()/rate; next < until {
					now = next
					return seconds(now), true
				}
			}
			now, burst = until, !burst
			length := b.Off
			if burst {
				length = b.On
			}
			until = now + r.ExpFloat64()*length.Seconds()
		}
	}
}

// Rate implements Process.
func (b Bursty) Rate() float64 {
	on, off := b.On.Seconds(), b.Off.Seconds()
	return (b.High*on + b.Low*off) / (on + off)
}

func (b Bursty) String() string {
	return fmt.Sprintf("bursty:%g,%g,%s,%s", b.Low, b.High, b.On, b.Off)
}

// Diurnal is a Poisson process whose rate goes up and down as a cosine, beginning at its lowest.
type Diurnal struct {
	Low, High float64 // arrivals a second
	Period    time.Duration
}

// ParseDiurnal reads LOW,HIGH,PERIOD: two rates a second and the length of a day.
func ParseDiurnal(s string) (d Diurnal, err error) {
	f := strings.Split(s, ",")
	if len(f) != 3 {
		return d, errors.New("want LOW,HIGH,PERIOD, for example 0.1,5,24h")
	}
	var errs [3]error
	d.Low, errs[0] = parseRate(f[0])
	d.High, errs[1] = parseRate(f[1])
	d.Period, errs[2] = ParseDuration(f[2])
	if err := errors.Join(errs[:]...); err != nil {
		return d, err
	}
	if d.High <= 0 || d.High < d.Low || d.Period <= 0 {
		return d, errors.New("the high rate must be above 0 and not below the low one, and the period above 0")
	}
	return d, nil
}

// Start implements Process, by thinning (P. Lewis, G. Shedler 1979).
func (d Diurnal) Start(r *rand.Rand) func() (time.Duration, bool) {
	now := 0.0
	return func() (time.Duration, bool) {
		for {
			now += r.ExpFloat64() / d.High
			phase := 2 * math.Pi * now / d.Period.Seconds()
			if rate := d.Low + (d.High-d.Low)*(1-math.Cos(phase))/2; r.Float64()*d.High < rate {
				return seconds(now), true
			}
		}
	}
}

// Rate implements Process.
func (d Diurnal) Rate() float64 { return (d.Low + d.High) / 2 }

func (d Diurnal) String() string { return fmt.Sprintf("diurnal:%g,%g,%s", d.Low, d.High, d.Period) }

func parseRate(s string) (float64, error) {
	rate, err := strconv.ParseFloat(strings.TrimSpace(s), 64)
	if err != nil || !(rate >= 0 && rate <= mostRate) {
		return 0, fmt.Errorf("rate %.40q: want arrivals a second, from 0 to %g", s, mostRate)
	}
	return rate, nil
}

// seconds is a time in seconds as a duration; it stays at the largest one.
func seconds(s float64) time.Duration {
	return time.Duration(min(s*float64(time.Second), math.MaxInt64/2))
}
