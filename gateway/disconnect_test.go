package gateway

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ephemeral-run/ephemeral/run"
)

// TestTenThousandDisconnects cuts 50 streams off 10,000 times in all, each time after a random byte, while the runs go on
// and after they have ended. What a client keeps, whole events alone, is the stored log each time.
func TestTenThousandDisconnects(t *testing.T) {
	const streams, cuts, runs, events = 50, 10_000, 10, 120
	l := newLive(t, Config{RateLimit: NoRateLimit})
	m := l.newMember("o", 1_000_000)
	var leases []*run.Lease
	for range runs {
		l.create(m)
		leases = append(leases, l.take())
		l.start(leases[len(leases)-1])
	}
	var writers, readers sync.WaitGroup
	for _, lease := range leases {
		writers.Go(func() {
			for range events {
				err := l.store.Append(l.ctx, lease, run.NewEvent{Type: run.EventShell, At: time.Now(), Data: run.ShellData{
					Command: "echo", Outcome: "exited", Output: strings.Repeat("é", rand.IntN(100))}})
				if err == nil {
					_, err = l.store.Renew(l.ctx, lease)
				}
				if err != nil {
					t.Error(err)
					return
				}
				time.Sleep(40 * time.Millisecond)
			}
			if _, err := l.store.Settle(l.ctx, lease, run.Outcome{At: time.Now(), State: run.Succeeded}); err != nil {
				t.Error(err)
			}
		})
	}
	var broken atomic.Int64
	logs := make([][]string, streams)
	for i := range streams {
		readers.Go(func() {
			for round := 0; !t.Failed() && (round == 0 || broken.Load() < cuts); round++ {
				log, err := l.brokenStream(m, leases[i%runs].Run, &broken)
				if err != nil {
					t.Errorf("stream %d: %v", i, err)
					return
				}
				logs[i] = append(logs[i], log)
			}
		})
	}
	writers.Wait()
	readers.Wait()
	rounds := 0
	for i, all := range logs {
		stored, _, err := l.store.Events(l.ctx, "o", leases[i%runs].Run, 0)
		l.must(err)
		var want bytes.Buffer
		for _, e := range stored {
			f, err := encodeFrame(e)
			l.must(err)
			want.Write(f.text)
		}
		for _, got := range all {
			rounds++
			if got != want.String() {
				t.Fatalf("stream %d is not the stored log: %d bytes, want %d", i, len(got), want.Len())
			}
		}
	}
	t.Logf("%d disconnects, %d times a whole log", broken.Load(), rounds)
	if broken.Load() < cuts {
		t.Errorf("only %d disconnects", broken.Load())
	}
	eventually(t, "no reader left", func() bool { return l.hub.size() == 0 })
}

// brokenStream reads a run's events to the end over connections that break after a random number of bytes, and returns the
// text of the events that came whole.
func (l *live) brokenStream(m member, id run.ID, broken *atomic.Int64) (string, error) {
	var log strings.Builder
	last := 0
	for {
		c, err := net.Dial("tcp", l.addr)
		if err != nil {
			return "", err
		}
		done, err := l.piece(c, m, id, rand.IntN(2500), &last, &log)
		c.Close()
		if err != nil || done {
			return log.String(), err
		}
		broken.Add(1)
	}
}

// piece reads at most limit bytes of an answer and keeps the whole events in them.
func (l *live) piece(c net.Conn, m member, id run.ID, limit int, last *int, log *strings.Builder) (done bool, err error) {
	if err := c.SetDeadline(time.Now().Add(30 * time.Second)); err != nil {
		return false, err
	}
	_, err = fmt.Fprintf(c, "GET /v1/runs/%s/events HTTP/1.1\r\nHost: x\r\nAccept: text/event-stream\r\nAuthorization: Bearer %s\r\nLast-Event-ID: %d\r\n\r\n", id, m.secret, *last)
	if err != nil {
		return false, err
	}
	resp, err := http.ReadResponse(bufio.NewReader(io.LimitReader(c, int64(limit))), nil)
	if err != nil {
		return false, nil // cut in the header
	}
	defer resp.Body.Close()
	switch resp.StatusCode {
	case http.StatusNoContent:
		return true, nil
	case http.StatusOK:
	default:
		return false, fmt.Errorf("status %d", resp.StatusCode)
	}
	in := bufio.NewReader(resp.Body)
	var frame strings.Builder
	for {
		line, err := in.ReadString('\n')
		if err != nil {
			return false, nil // cut in a line, or after the last
		}
		frame.WriteString(line)
		if line != "\n" {
			continue
		}
		text := frame.String()
		frame.Reset()
		number, isEvent := strings.CutPrefix(text, "id: ")
		if !isEvent {
			continue // retry or a heartbeat
		}
		number, _, _ = strings.Cut(number, "\n")
		n, err := strconv.Atoi(number)
		if err != nil || n != *last+1 {
			return false, fmt.Errorf("event %q after event %d", number, *last)
		}
		*last = n
		log.WriteString(text)
		if strings.Contains(text, "\nevent: worker.destroyed\n") {
			return true, nil
		}
	}
}
