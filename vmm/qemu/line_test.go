package qemu

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/ephemeral-run/ephemeral/guestagent/proto/mux"
	"github.com/ephemeral-run/ephemeral/vmm"
)

const (
	echoPort uint32 = 7
	hostPort uint32 = 9
)

// lineGuest is a guest that echoes, and can be connected anew.
type lineGuest struct {
	t       *testing.T
	line    *line
	renewed atomic.Int32
	hostile bool // ends every session at once

	mu      sync.Mutex
	session *mux.Session
	wg      sync.WaitGroup
}

func newLineGuest(t *testing.T, hostile bool) *lineGuest {
	t.Helper()
	t.Cleanup(func() { goleak.VerifyNone(t) })
	g := &lineGuest{t: t, hostile: hostile}
	host, guest := net.Pipe()
	g.serve(guest)
	g.line = newLine(host, func(context.Context) (net.Conn, error) {
		g.renewed.Add(1)
		host, guest := net.Pipe()
		g.serve(guest)
		return host, nil
	})
	t.Cleanup(func() {
		g.line.close()
		g.wg.Wait()
	})
	return g
}

func (g *lineGuest) serve(conn net.Conn) {
	g.wg.Go(func() {
		session, err := mux.Guest(conn)
		if err != nil {
			_ = conn.Close()
			return
		}
		defer func() { _ = session.Close() }()
		if g.hostile {
			return
		}
		g.mu.Lock()
		g.session = session
		g.mu.Unlock()
		ln, err := session.Listen(echoPort)
		if err != nil {
			return
		}
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			g.wg.Go(func() {
				_, _ = io.Copy(c, c)
				_ = c.Close()
			})
		}
	})
}

// call is the guest's connection to a port of the host.
func (g *lineGuest) call(ctx context.Context, port uint32) (string, error) {
	g.mu.Lock()
	session := g.session
	g.mu.Unlock()
	conn, err := session.Dial(ctx, port)
	if err != nil {
		return "", err
	}
	defer func() { _ = conn.Close() }()
	got, err := io.ReadAll(conn)
	return string(got), err
}

func (g *lineGuest) echo(ctx context.Context) error {
	conn, err := g.line.dial(ctx, echoPort)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	if _, err := io.WriteString(conn, "hello"); err != nil {
		return err
	}
	got := make([]byte, 5)
	if _, err := io.ReadFull(conn, got); err != nil || string(got) != "hello" {
		return fmt.Errorf("echo %q: %w", got, err)
	}
	return nil
}

func TestLineConnectsAnew(t *testing.T) {
	g := newLineGuest(t, false)
	ctx := shortly(t)
	for i := range 3 {
		var wg sync.WaitGroup
		for range 8 {
			wg.Go(func() {
				if err := g.echo(ctx); err != nil {
					t.Errorf("round %d: %v", i, err)
				}
			})
		}
		wg.Wait()
		if !g.line.connected() {
			t.Error("not connected")
		}
		g.line.disconnect()
		g.line.disconnect()
		if g.line.connected() {
			t.Error("connected after disconnect")
		}
	}
	if n := g.renewed.Load(); n != 2 {
		t.Errorf("%d new connections for three rounds", n)
	}
}

func TestLineSurvivesTheEndOfASession(t *testing.T) {
	g := newLineGuest(t, false)
	ctx := shortly(t)
	for range 3 {
		if err := g.echo(ctx); err != nil {
			t.Fatal(err)
		}
		g.mu.Lock()
		_ = g.session.Close() // the guest's agent starts over
		g.mu.Unlock()
	}
}

func TestLineListens(t *testing.T) {
	g := newLineGuest(t, false)
	ctx := shortly(t)
	ln, err := g.line.listen(hostPort)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := g.line.listen(hostPort); !errors.Is(err, mux.ErrPortInUse) {
		t.Errorf("the port can be taken twice: %v", err)
	}
	var served sync.WaitGroup
	serve := func(ln net.Listener) {
		served.Go(func() {
			for {
				c, err := ln.Accept()
				if err != nil {
					if !errors.Is(err, net.ErrClosed) {
						t.Errorf("accept: %v", err)
					}
					return
				}
				_, _ = io.WriteString(c, "welcome")
				_ = c.Close()
			}
		})
	}
	serve(ln)
	expect := func(what, want string) {
		t.Helper()
		if err := g.echo(ctx); err != nil { // a session is there
			t.Fatal(err)
		}
		if got, err := g.call(ctx, hostPort); got != want {
			t.Errorf("%s: the guest got %q, %v", what, got, err)
		}
	}
	expect("at first", "welcome")
	g.line.disconnect()
	expect("connected anew", "welcome")
	_ = ln.Close()
	_ = ln.Close()
	expect("closed", "")
	if ln, err = g.line.listen(hostPort); err != nil {
		t.Fatal(err)
	}
	serve(ln)
	expect("opened again", "welcome")
	g.line.close() // ends the listener
	served.Wait()
	if _, err := g.line.listen(hostPort); !errors.Is(err, vmm.ErrClosed) {
		t.Errorf("listen on a closed line: %v", err)
	}
	if _, err := g.line.dial(ctx, echoPort); !errors.Is(err, vmm.ErrClosed) {
		t.Errorf("dial on a closed line: %v", err)
	}
}

// TestLineBoundsStartingOver has a guest that ends every session, while the host listens.
func TestLineBoundsStartingOver(t *testing.T) {
	g := newLineGuest(t, true)
	if _, err := g.line.listen(hostPort); err != nil {
		t.Fatal(err)
	}
	const long = 550 * time.Millisecond
	ctx, cancel := context.WithTimeout(context.Background(), long)
	defer cancel()
	if _, err := g.line.dial(ctx, echoPort); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("dial: %v", err)
	}
	if n := g.renewed.Load(); n < 2 || time.Duration(n) > long/renewEvery+1 {
		t.Errorf("%d new connections in %v", n, long)
	}
}

func TestLineCloseEndsOpening(t *testing.T) {
	t.Cleanup(func() { goleak.VerifyNone(t) })
	host, guest := net.Pipe() // of a guest that is paused: nobody reads
	defer func() { _ = guest.Close() }()
	l := newLine(host, func(context.Context) (net.Conn, error) { return nil, errors.New("no other line") })
	ended := make(chan error, 1)
	go func() {
		_, err := l.dial(context.Background(), echoPort)
		ended <- err
	}()
	time.Sleep(20 * time.Millisecond)
	l.close()
	select {
	case err := <-ended:
		if !errors.Is(err, vmm.ErrClosed) {
			t.Errorf("dial: %v", err)
		}
	case <-time.After(5 * time.Second):
		t.Error("dial outlives its line")
	}
}
