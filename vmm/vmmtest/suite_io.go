package vmmtest

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/ephemeral-run/ephemeral/guestagent/proto"
	"github.com/ephemeral-run/ephemeral/vmm"
)

// nobody is a port that no one listens on.
const nobody uint32 = 4242

// soon is long enough for a wrong success to show.
const soon = 200 * time.Millisecond

func (s *suite) testDialRetries(t *testing.T) {
	m := s.boot(t, nil) // the agent is seconds away
	conn, err := m.Dial(s.within(t, bootTime), proto.AgentPort)
	if err != nil {
		t.Fatal(err)
	}
	_ = conn.Close()
}

func (s *suite) testDialEndsWithContext(t *testing.T) {
	m, a := s.running(t)
	for name, port := range map[string]uint32{"nobody listens": nobody, "cancelled before": proto.AgentPort} {
		ctx, cancel := context.WithTimeout(context.Background(), soon)
		if port == proto.AgentPort {
			cancel()
		}
		begin := time.Now()
		conn, err := m.Dial(ctx, port)
		cancel()
		if err == nil {
			_ = conn.Close()
			t.Errorf("%s: connected", name)
		}
		if took := time.Since(begin); took > soon+s.limit(endTime) {
			t.Errorf("%s: dial took %v beyond its context", name, took)
		}
	}
	if err := a.Ping(s.within(t, callTime)); err != nil {
		t.Errorf("after refused dials: %v", err)
	}
}

// testListen has the worker of a clone call the broker, once a clone, since each runs a worker only once.
func (s *suite) testListen(t *testing.T) {
	listen := func(t *testing.T, m vmm.Machine) (stop func()) {
		ln, err := m.Listen(proto.BrokerPort)
		if err != nil {
			t.Fatal(err)
		}
		return s.broker(ln)
	}
	for _, c := range []struct {
		name  string
		setup func(t *testing.T, m vmm.Machine) (stop func())
		want  bool
	}{
		{"nobody", func(*testing.T, vmm.Machine) func() { return func() {} }, false},
		{"served", listen, true},
		{"twice", func(t *testing.T, m vmm.Machine) func() {
			stop := listen(t, m)
			if _, err := m.Listen(proto.BrokerPort); err == nil {
				t.Error("the port can be taken twice")
			}
			return stop
		}, true},
		{"closed", func(t *testing.T, m vmm.Machine) func() { listen(t, m)(); return func() {} }, false},
		{"closed and opened again", func(t *testing.T, m vmm.Machine) func() { listen(t, m)(); return listen(t, m) }, true},
		{"reconnected", func(t *testing.T, m vmm.Machine) func() {
			stop := listen(t, m)
			if err := m.Disconnect(); err != nil {
				t.Error(err)
			}
			return stop
		}, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			m, a := s.running(t)
			stop := c.setup(t, m)
			defer stop()
			if err := a.Prepare(s.within(t, callTime)); err != nil {
				t.Fatal(err)
			}
			if got := s.workerReachesBroker(t, a); got != c.want {
				t.Errorf("the guest's call arrived: %t", got)
			}
		})
	}
}

// answered is what the host's side of the broker's port says, with which the worker ends.
const answered = "the conformance suite has no model"

// broker refuses every call. The returned function stops it and closes the listener.
func (s *suite) broker(ln net.Listener) (stop func()) {
	server := &http.Server{
		ReadHeaderTimeout: time.Minute,
		Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(http.StatusNotFound)
			_, _ = fmt.Fprintf(w, `{"error":{"code":"not_found","message":%q,"type":"test"}}`, answered)
		}),
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = server.Serve(ln)
	}()
	return func() {
		_ = server.Close()
		<-done
	}
}

// workerReachesBroker lets the worker run and tells whether the broker's refusal reached it.
func (s *suite) workerReachesBroker(t *testing.T, a *Agent) bool {
	t.Helper()
	got, err := a.StartWorker(s.within(t, 2*callTime), &proto.StartWorkerRequest{Prompt: "hello", Model: "test/none", MaxSteps: 1})
	if err != nil {
		t.Fatal(err)
	}
	if got.GetOk() {
		t.Fatalf("a worker without a model succeeds: %v", got)
	}
	t.Logf("worker: %s: %s", got.GetErrorCode(), got.GetErrorDetail())
	return strings.Contains(got.GetErrorDetail(), answered)
}

func (s *suite) testManyStreams(t *testing.T) {
	_, a := s.running(t)
	const streams = 24
	var group errgroup.Group
	for i := range streams {
		group.Go(func() error {
			var out bytes.Buffer
			want := fmt.Sprintf("stream %d\n", i)
			if err := a.Run(s.within(t, 20*callTime), nil, &out, "echo", strings.TrimSpace(want)); err != nil {
				return err
			}
			if out.String() != want {
				return fmt.Errorf("stream %d says %q", i, out.String())
			}
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		t.Error(err)
	}
}

func (s *suite) testBytesToHost(t *testing.T) {
	_, a := s.running(t)
	// The lines of seq are the same everywhere and never repeat.
	command := fmt.Sprintf("seq 100000000 | head -c %d", s.StreamBytes)
	sum := sha256.New()
	begin := time.Now()
	if err := a.Run(s.within(t, 30*callTime), nil, sum, "sh", "-c", command); err != nil {
		t.Fatal(err)
	}
	took := time.Since(begin)
	want := sha256.New()
	if _, err := io.Copy(want, io.LimitReader(&sequence{}, s.StreamBytes)); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(sum.Sum(nil), want.Sum(nil)) {
		t.Error("bytes were lost or changed")
	}
	t.Logf("%d bytes in %v, %.1f MiB/s", s.StreamBytes, took, float64(s.StreamBytes)/(1<<20)/took.Seconds())
}

// sequence reads like the output of seq.
type sequence struct {
	next int
	rest []byte
}

// Read never fails.
func (q *sequence) Read(p []byte) (int, error) {
	for len(q.rest) < len(p) {
		q.next++
		q.rest = fmt.Appendln(q.rest, q.next)
	}
	n := copy(p, q.rest)
	q.rest = append(q.rest[:0], q.rest[n:]...)
	return n, nil
}

func (s *suite) testBytesToGuest(t *testing.T) {
	_, a := s.running(t)
	sum := sha256.New()
	random := rand.NewChaCha8([32]byte{1}) // bytes that do not repeat; the same in every run
	in := io.TeeReader(io.LimitReader(random, s.StreamBytes), sum)
	var out bytes.Buffer
	begin := time.Now()
	if err := a.Run(s.within(t, 30*callTime), in, &out, "sha256sum"); err != nil {
		t.Fatal(err)
	}
	took := time.Since(begin)
	if want := hex.EncodeToString(sum.Sum(nil)); !strings.HasPrefix(out.String(), want) {
		t.Errorf("bytes were lost or changed: the guest has %s, want %s", out.String(), want)
	}
	t.Logf("%d bytes in %v, %.1f MiB/s", s.StreamBytes, took, float64(s.StreamBytes)/(1<<20)/took.Seconds())
}

func (s *suite) testPauseAndResume(t *testing.T) {
	m, a := s.running(t)
	// A command that runs across the pause.
	long := make(chan error, 1)
	var out bytes.Buffer
	go func() {
		long <- a.Run(s.within(t, 20*callTime), nil, &out, "sh", "-c", "for i in 1 2 3 4 5 6; do echo $i; sleep 0.1; done")
	}()
	for range 3 {
		for range 2 { // idempotent
			if err := m.Pause(s.within(t, callTime)); err != nil {
				t.Fatal(err)
			}
		}
		s.mustNotAnswer(t, a)
		for range 2 {
			if err := m.Resume(s.within(t, callTime)); err != nil {
				t.Fatal(err)
			}
		}
		if err := a.Ping(s.within(t, callTime)); err != nil {
			t.Fatalf("after resume: %v", err)
		}
	}
	if err := <-long; err != nil {
		t.Errorf("command across pauses: %v", err)
	}
	if got := out.String(); got != "1\n2\n3\n4\n5\n6\n" {
		t.Errorf("command across pauses printed %q", got)
	}
}

func (s *suite) mustNotAnswer(t *testing.T, a *Agent) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), soon)
	defer cancel()
	if err := a.Ping(ctx); err == nil {
		t.Error("a paused machine answers")
	}
}

func (s *suite) testDisconnect(t *testing.T) {
	m, a := s.running(t)
	conn, err := m.Dial(s.within(t, callTime), proto.AgentPort)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	ended := make(chan error, 1)
	go func() {
		_, err := conn.Read(make([]byte, 1))
		ended <- err
	}()
	for range 2 { // idempotent
		if err := m.Disconnect(); err != nil {
			t.Fatal(err)
		}
	}
	select {
	case err := <-ended:
		if err == nil {
			t.Error("an ended connection has data")
		}
	case <-time.After(s.limit(endTime)):
		t.Error("a connection outlives disconnect")
	}
	for range 3 {
		if err := a.Ping(s.within(t, callTime)); err != nil {
			t.Fatalf("after disconnect: %v", err)
		}
		if err := m.Disconnect(); err != nil {
			t.Fatal(err)
		}
	}
}

func (s *suite) testCloseEndsCalls(t *testing.T) {
	m, a := s.running(t)
	ln, err := m.Listen(proto.BrokerPort)
	if err != nil {
		t.Fatal(err)
	}
	conn, err := m.Dial(s.within(t, callTime), proto.AgentPort)
	if err != nil {
		t.Fatal(err)
	}
	ended := map[string]chan error{"accept": make(chan error, 1), "read": make(chan error, 1), "command": make(chan error, 1), "dial": make(chan error, 1)}
	ctx := s.within(t, bootTime)
	go func() { _, err := ln.Accept(); ended["accept"] <- err }()
	go func() { _, err := conn.Read(make([]byte, 1)); ended["read"] <- err }()
	go func() { ended["command"] <- a.Run(ctx, nil, io.Discard, "sleep", "1000") }()
	go func() { _, err := m.Dial(ctx, nobody); ended["dial"] <- err }()
	time.Sleep(soon)
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
	for name, result := range ended {
		select {
		case err := <-result:
			if err == nil {
				t.Errorf("%s succeeds although the machine was closed", name)
			}
			if name == "dial" && !errors.Is(err, vmm.ErrClosed) {
				t.Errorf("dial: %v", err)
			}
		case <-time.After(s.limit(endTime)):
			t.Errorf("%s outlives the machine", name)
		}
	}
	_ = conn.Close()
}
