// Package workload describes what a pool has to serve: when claims arrive and how long they, and the pool's own work,
// take. Everything is drawn from seeded generators, so the same seed gives the same workload.
package workload

import (
	"bufio"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"time"
)

// Dist is a distribution of durations.
type Dist interface {
	Sample(r *rand.Rand) time.Duration
	Mean() time.Duration
	String() string // as ParseDist reads it
}

const (
	// longest is the longest duration a distribution may be given.
	longest = 30 * 24 * time.Hour
	// mostValues bounds a file of durations.
	mostValues = 5_000_000
)

// ParseDist reads a distribution:
//
//	const:250ms           always the same
//	exp:1s                exponential, by its mean
//	uniform:1s,3s         between two
//	lognormal:1s,1.5      log-normal, by its mean and its coefficient of variation (standard deviation / mean)
//	file:durations.txt    one of the durations in a file, one a line, as 1.5s or in seconds
//
// A bare duration is constant.
func ParseDist(s string) (Dist, error) {
	kind, arg, found := strings.Cut(s, ":")
	if !found {
		kind, arg = "const", s
	}
	d, err := parseDist(kind, arg)
	if err != nil {
		return nil, fmt.Errorf("distribution %q: %w", s, err)
	}
	return d, nil
}

func parseDist(kind, arg string) (Dist, error) {
	args := strings.Split(arg, ",")
	want := map[string]int{"const": 1, "exp": 1, "uniform": 2, "lognormal": 2}
	if kind == "file" {
		return readDist(arg)
	}
	if n, known := want[kind]; !known {
		return nil, errors.New("want const:, exp:, uniform:, lognormal: or file: before its values")
	} else if len(args) != n {
		return nil, fmt.Errorf("%s takes %d values separated by commas, not %d", kind, n, len(args))
	}
	first, err := ParseDuration(args[0])
	if err != nil {
		return nil, err
	}
	switch kind {
	case "const":
		return Const(first), nil
	case "exp":
		return Exp(first), nil
	case "uniform":
		second, err := ParseDuration(args[1])
		if err != nil {
			return nil, err
		}
		if second < first {
			return nil, fmt.Errorf("%s is less than %s", second, first)
		}
		return Uniform{first, second}, nil
	}
	cv, err := strconv.ParseFloat(args[1], 64)
	if err != nil || !(cv >= 0 && cv <= 100) {
		return nil, fmt.Errorf("coefficient of variation %q: must be a number from 0 to 100", args[1])
	}
	return LogNormal(first, cv), nil
}

// ParseDuration reads a duration that is not negative, with a unit or in seconds.
func ParseDuration(s string) (time.Duration, error) {
	s = strings.TrimSpace(s)
	d, err := time.ParseDuration(s)
	if err != nil {
		seconds, ferr := strconv.ParseFloat(s, 64)
		if ferr != nil || !(math.Abs(seconds) <= longest.Seconds()) {
			return 0, fmt.Errorf("duration %.40q: want one like 1.5s or 250ms, or seconds, up to %s", s, longest)
		}
		d = time.Duration(math.Round(seconds * float64(time.Second)))
	}
	if d < 0 || d > longest {
		return 0, fmt.Errorf("duration %.40q: must be from 0 to %s", s, longest)
	}
	return d, nil
}

// Const is always the same duration.
type Const time.Duration

// Sample implements Dist.
func (c Const) Sample(*rand.Rand) time.Duration { return time.Duration(c) }

// Mean implements Dist.
func (c Const) Mean() time.Duration { return time.Duration(c) }

func (c Const) String() string { return "const:" + time.Duration(c).String() }

// Exp is the exponential distribution of this mean.
type Exp time.Duration

// Sample implements Dist.
func (e Exp) Sample(r *rand.Rand) time.Duration { return time.Duration(r.ExpFloat64() * float64(e)) }

// Mean implements Dist.
func (e Exp) Mean() time.Duration { return time.Duration(e) }

func (e Exp) String() string { return "exp:" + time.Duration(e).String() }

// Uniform is between two durations.
type Uniform struct{ Low, High time.Duration }

// Sample implements Dist.
func (u Uniform) Sample(r *rand.Rand) time.Duration {
	return u.Low + time.Duration(r.Float64()*float64(u.High-u.Low))
}

// Mean implements Dist.
func (u Uniform) Mean() time.Duration { return (u.Low + u.High) / 2 }

func (u Uniform) String() string { return fmt.Sprintf("uniform:%s,%s", u.Low, u.High) }

type logNormal struct {
	mean      time.Duration
	cv        float64
	mu, sigma float64
}

// LogNormal is the log-normal distribution of this mean and coefficient of variation.
func LogNormal(mean time.Duration, cv float64) Dist {
	sigma2 := math.Log1p(cv * cv)
	return logNormal{mean, cv, math.Log(float64(mean)) - sigma2/2, math.Sqrt(sigma2)}
}

func (l logNormal) Sample(r *rand.Rand) time.Duration {
	if l.mean == 0 {
		return 0
	}
	return time.Duration(min(math.Exp(l.mu+l.sigma*r.NormFloat64()), float64(longest)))
}

func (l logNormal) Mean() time.Duration { return l.mean }

func (l logNormal) String() string { return fmt.Sprintf("lognormal:%s,%g", l.mean, l.cv) }

type empirical struct {
	values []time.Duration
	mean   time.Duration
	name   string
}

// Empirical draws from what was measured.
func Empirical(name string, values []time.Duration) (Dist, error) {
	if len(values) == 0 {
		return nil, errors.New("no durations")
	}
	sum := 0.0
	for _, v := range values {
		sum += float64(v)
	}
	return empirical{values, time.Duration(sum / float64(len(values))), name}, nil
}

func (e empirical) Sample(r *rand.Rand) time.Duration { return e.values[r.IntN(len(e.values))] }
func (e empirical) Mean() time.Duration               { return e.mean }
func (e empirical) String() string                    { return e.name }

// readDist reads durations, one a line; empty lines and what follows # count for nothing.
func readDist(path string) (Dist, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close() // only read from
	var values []time.Duration
	lines := bufio.NewScanner(f)
	for n := 1; lines.Scan(); n++ {
		text, _, _ := strings.Cut(lines.Text(), "#")
		if strings.TrimSpace(text) == "" {
			continue
		}
		d, err := ParseDuration(text)
		if err != nil {
			return nil, fmt.Errorf("line %d: %w", n, err)
		}
		if values = append(values, d); len(values) > mostValues {
			return nil, fmt.Errorf("more than %d durations", mostValues)
		}
	}
	if err := lines.Err(); err != nil {
		return nil, err
	}
	return Empirical("file:"+path, values)
}
