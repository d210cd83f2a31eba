package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
)

// load asks one server the same over many connections, each with one request under way at a time.
type load struct {
	addr        string
	connections int
	requests    [][]byte      // one for each connection, in turns; each run of keyDigits '#' in it becomes a number of its own
	status      int           // that every answer has to have
	number      *atomic.Int64 // the last number used
	rate        float64       // requests a second, evenly spread; 0: as fast as they are answered
}

// keyDigits is how long the part of a request is that differs from one to the next.
const keyDigits = 16

// loaded is what a load measured.
type loaded struct {
	answered int
	elapsed  time.Duration
	took     []time.Duration // sorted; of a paced load counted from when the request was due
}

func (l loaded) perSecond() float64 { return float64(l.answered) / l.elapsed.Seconds() }

// at is a quantile of the durations in milliseconds.
func (l loaded) at(q float64) float64 {
	if len(l.took) == 0 {
		return 0
	}
	return float64(l.took[min(int(q*float64(len(l.took))), len(l.took)-1)].Microseconds()) / 1000
}

// run sends n requests.
func (l load) run(ctx context.Context, n int) (loaded, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var sent atomic.Int64
	took := make([][]time.Duration, l.connections)
	var clients sync.WaitGroup
	began := time.Now()
	for i := range l.connections {
		clients.Go(func() {
			var err error
			took[i], err = l.one(ctx, began, slices.Clone(l.requests[i%len(l.requests)]), &sent, int64(n))
			if err != nil {
				cancel(err)
			}
		})
	}
	clients.Wait()
	r := loaded{elapsed: time.Since(began), took: slices.Concat(took...)}
	r.answered = len(r.took)
	slices.Sort(r.took)
	return r, context.Cause(ctx)
}

// one is one connection: it takes the next request that is due until all are sent.
func (l load) one(ctx context.Context, began time.Time, request []byte, sent *atomic.Int64, n int64) (took []time.Duration, err error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "tcp", l.addr)
	if err != nil {
		return nil, fmt.Errorf("dial: %w", err)
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	in := bufio.NewReader(conn)
	marks := positions(request)
	for ctx.Err() == nil {
		turn := sent.Add(1)
		if turn > n {
			break
		}
		from := time.Now()
		if l.rate > 0 {
			from = began.Add(time.Duration(float64(turn) / l.rate * float64(time.Second)))
			time.Sleep(time.Until(from))
		}
		number := l.number.Add(1)
		for _, at := range marks {
			write(request[at:at+keyDigits], number)
		}
		if _, err := conn.Write(request); err != nil {
			return took, fmt.Errorf("send: %w", err)
		}
		status, err := answer(in)
		if err != nil {
			return took, fmt.Errorf("read the answer: %w", err)
		}
		if status != l.status {
			return took, fmt.Errorf("answered with status %d, want %d", status, l.status)
		}
		took = append(took, time.Since(from))
	}
	return took, nil
}

// positions is where the numbers of a request are.
func positions(request []byte) (at []int) {
	mark := bytes.Repeat([]byte{'#'}, keyDigits)
	for i := 0; ; {
		n := bytes.Index(request[i:], mark)
		if n < 0 {
			return at
		}
		at = append(at, i+n)
		i += n + keyDigits
	}
}

// write fills b with the digits of n.
func write(b []byte, n int64) {
	for i := len(b) - 1; i >= 0; i-- {
		b[i] = byte('0' + n%10)
		n /= 10
	}
}

// answer reads one answer of HTTP/1.1 that has a Content-Length and returns its status.
func answer(in *bufio.Reader) (status int, err error) {
	length := -1
	for first := true; ; first = false {
		line, err := in.ReadSlice('\n')
		if err != nil {
			return 0, err
		}
		line = bytes.TrimRight(line, "\r\n")
		switch {
		case first:
			if len(line) < 12 {
				return 0, errors.New("no status line")
			}
			if status, err = strconv.Atoi(string(line[9:12])); err != nil {
				return 0, fmt.Errorf("status line: %w", err)
			}
		case len(line) == 0:
			if length < 0 {
				return 0, errors.New("no Content-Length")
			}
			_, err = io.CopyN(io.Discard, in, int64(length))
			return status, err
		default:
			name, value, _ := bytes.Cut(line, []byte(":"))
			if bytes.EqualFold(name, []byte("Content-Length")) {
				if length, err = strconv.Atoi(string(bytes.TrimSpace(value))); err != nil {
					return 0, fmt.Errorf("length: %w", err)
				}
			}
		}
	}
}
