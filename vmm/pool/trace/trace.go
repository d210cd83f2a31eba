// Package trace reads and writes recorded arrivals: CSV with a header line, one claim a line, in order of time.
//
//	arrived,service_seconds
//	2026-10-07T09:00:00.125Z,14.2
//	2026-10-07T09:00:01.004Z,8.75
//
// The column arrived holds RFC 3339 times or seconds from any origin. service_seconds, how long the claim kept its
// machine, may be missing. Other columns are ignored.
package trace

import (
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/ephemeral-run/ephemeral/vmm/pool/workload"
)

const (
	// mostRows bounds a trace; mostBytes the file it is read from.
	mostRows  = 20_000_000
	mostBytes = 2 << 30
	// longest is the longest time a trace may span.
	longest = 10 * 365 * 24 * time.Hour

	columnArrived = "arrived"
	columnService = "service_seconds"
)

// Trace is recorded arrivals; the first is at 0.
type Trace struct {
	Arrivals []workload.Arrival
	Service  bool // service times are known
}

// Read reads a trace. Errors name the line.
func Read(r io.Reader) (Trace, error) {
	limited := &io.LimitedReader{R: r, N: mostBytes}
	rows := csv.NewReader(limited)
	rows.ReuseRecord, rows.Comment, rows.TrimLeadingSpace = true, '#', true
	header, err := rows.Read()
	if err != nil {
		return Trace{}, fmt.Errorf("read the header of a trace: %w", err)
	}
	at, service := slices.Index(header, columnArrived), slices.Index(header, columnService)
	if at < 0 {
		return Trace{}, fmt.Errorf("the header of a trace must name a column %q", columnArrived)
	}
	t := Trace{Service: service >= 0}
	clock := clock{}
	for {
		row, err := rows.Read()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return Trace{}, fmt.Errorf("read a trace: %w", err)
		}
		line, _ := rows.FieldPos(0)
		a := workload.Arrival{}
		if a.At, err = clock.read(row[at]); err != nil {
			return Trace{}, fmt.Errorf("line %d of a trace: %w", line, err)
		}
		if t.Service {
			if a.Service, err = workload.ParseDuration(row[service]); err != nil {
				return Trace{}, fmt.Errorf("line %d of a trace: %s: %w", line, columnService, err)
			}
		}
		if t.Arrivals = append(t.Arrivals, a); len(t.Arrivals) > mostRows {
			return Trace{}, fmt.Errorf("a trace of more than %d arrivals", mostRows)
		}
	}
	switch {
	case limited.N == 0:
		return Trace{}, fmt.Errorf("a trace of more than %d bytes", int64(mostBytes))
	case len(t.Arrivals) == 0:
		return Trace{}, errors.New("a trace without arrivals")
	}
	return t, nil
}

// clock turns the times of a trace into times since its first.
type clock struct {
	started, absolute bool
	first             time.Time
	origin            float64
	last              time.Duration
}

func (c *clock) read(s string) (time.Duration, error) {
	s = strings.TrimSpace(s)
	number, nerr := strconv.ParseFloat(s, 64)
	moment, merr := time.Parse(time.RFC3339Nano, s)
	if nerr != nil && merr != nil || nerr == nil && !(math.Abs(number) < 1e12) {
		return 0, fmt.Errorf("%s: %.40q is neither an RFC 3339 time nor seconds", columnArrived, s)
	}
	absolute := merr == nil
	if !c.started {
		c.started, c.absolute, c.first, c.origin = true, absolute, moment, number
	}
	if absolute != c.absolute {
		return 0, fmt.Errorf("%s: %.40q: times and seconds in one trace", columnArrived, s)
	}
	span := number - c.origin
	if absolute {
		span = moment.Sub(c.first).Seconds()
	}
	if !(math.Abs(span) <= longest.Seconds()) {
		return 0, fmt.Errorf("%s: %.40q: the trace spans more than %s", columnArrived, s, longest)
	}
	at := time.Duration(math.Round(span * 1e9))
	if absolute {
		at = moment.Sub(c.first)
	}
	if at < c.last {
		return 0, fmt.Errorf("%s: %.40q is before the arrival above it", columnArrived, s)
	}
	c.last = at
	return at, nil
}

// Write writes a trace that Read reads, with times in seconds.
func Write(w io.Writer, t Trace) error {
	out := csv.NewWriter(w)
	row := []string{columnArrived, columnService}
	if !t.Service {
		row = row[:1]
	}
	if err := out.Write(row); err != nil {
		return fmt.Errorf("write a trace: %w", err)
	}
	for _, a := range t.Arrivals {
		row[0] = strconv.FormatFloat(a.At.Seconds(), 'f', -1, 64)
		if t.Service {
			row[1] = strconv.FormatFloat(a.Service.Seconds(), 'f', -1, 64)
		}
		if err := out.Write(row); err != nil {
			return fmt.Errorf("write a trace: %w", err)
		}
	}
	out.Flush()
	if err := out.Error(); err != nil {
		return fmt.Errorf("write a trace: %w", err)
	}
	return nil
}
