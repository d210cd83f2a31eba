package mux

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/hashicorp/yamux"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// line is a socket pair: what a serial port is between a VMM and its parent.
func line(t testing.TB) (host, guest net.Conn) {
	t.Helper()
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC|syscall.SOCK_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	ends := make([]net.Conn, 2)
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "line")
		if ends[i], err = net.FileConn(f); err != nil {
			t.Fatal(err)
		}
		_ = f.Close()
		t.Cleanup(func() { _ = ends[i].Close() })
	}
	return ends[0], ends[1]
}

func timeout(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func sessions(t testing.TB) (host, guest *Session) {
	t.Helper()
	h, g := line(t)
	return greet(t, h, g)
}

func greet(t testing.TB, h, g io.ReadWriteCloser) (host, guest *Session) {
	t.Helper()
	up := make(chan error, 1)
	go func() {
		var err error
		guest, err = Guest(g)
		up <- err
	}()
	host, err := Host(timeout(t), h)
	if err != nil {
		t.Fatal(err)
	}
	if err := <-up; err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = host.Close(); _ = guest.Close() })
	return host, guest
}

func echo(l net.Listener) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			_, _ = io.Copy(c, c)
			_ = c.Close()
		}()
	}
}

func TestBothDirections(t *testing.T) {
	host, guest := sessions(t)
	for _, d := range []struct {
		name     string
		from, to *Session
	}{{"host to guest", host, guest}, {"guest to host", guest, host}} {
		t.Run(d.name, func(t *testing.T) {
			l, err := d.to.Listen(7)
			if err != nil {
				t.Fatal(err)
			}
			go echo(l)
			var wg sync.WaitGroup
			for range 20 {
				wg.Go(func() {
					c, err := d.from.Dial(timeout(t), 7)
					if err != nil {
						t.Error(err)
						return
					}
					defer c.Close()
					want := make([]byte, 300_000)
					_, _ = rand.Read(want)
					go func() { _, _ = c.Write(want) }()
					got := make([]byte, len(want))
					if _, err := io.ReadFull(c, got); err != nil || !bytes.Equal(got, want) {
						t.Errorf("echo differs, %v", err)
					}
				})
			}
			wg.Wait()
			if _, err := d.to.Listen(7); !errors.Is(err, ErrPortInUse) {
				t.Errorf("second listener: %v", err)
			}
			_ = l.Close()
			if _, err := d.from.Dial(timeout(t), 7); !errors.Is(err, ErrRefused) {
				t.Errorf("dial of a closed listener: %v", err)
			}
		})
	}
}

func TestStaleBytesOfAnEarlierSession(t *testing.T) {
	h, g := line(t)
	stale := record{kind: kindHello, nonce: [nonceSize]byte{1}}.bytes()
	begin := record{kind: kindBegin, nonce: [nonceSize]byte{2}}.bytes()
	answer := record{kind: kindAnswer, nonce: [nonceSize]byte{1}}.bytes()
	frames := append(bytes.Repeat([]byte{0, 1, 0, 0, 0, 0, 0, 1, 0, 0, 0, 9, 0xe5, 'E'}, 1000), kindHello[:5]...)
	for _, piece := range [][]byte{frames, stale, begin, frames} {
		if _, err := h.Write(piece); err != nil {
			t.Fatal(err)
		}
	}
	for _, piece := range [][]byte{frames, answer, frames} {
		if _, err := g.Write(piece); err != nil {
			t.Fatal(err)
		}
	}
	host, guest := greet(t, h, g)
	l, err := guest.Listen(1)
	if err != nil {
		t.Fatal(err)
	}
	go echo(l)
	c, err := host.Dial(timeout(t), 1)
	if err != nil {
		t.Fatal(err)
	}
	_ = c.Close()
}

func TestHelloLostBeforeTheGuestOpened(t *testing.T) {
	h, g := line(t)
	lost := make(chan struct{})
	go func() { // what a guest does that reopens its port
		defer close(lost)
		_, _ = io.ReadFull(g, make([]byte, recordSize+3))
	}()
	up := make(chan *Session, 1)
	go func() {
		<-lost
		s, err := Guest(g)
		if err != nil {
			t.Error(err)
		}
		up <- s
	}()
	host, err := Host(timeout(t), h)
	if err != nil {
		t.Fatal(err)
	}
	_ = host.Close()
	if s := <-up; s != nil {
		_ = s.Close()
	}
}

func TestHostWithoutGuestEndsWithItsContext(t *testing.T) {
	h, g := line(t)
	ctx, cancel := context.WithTimeout(context.Background(), 120*time.Millisecond)
	defer cancel()
	if _, err := Host(ctx, h); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatal(err)
	}
	if _, err := Guest(g); err == nil {
		t.Fatal("guest got a session from a host that gave up")
	}
}

func TestEndOfOneSideEndsTheOther(t *testing.T) {
	host, guest := sessions(t)
	l, err := guest.Listen(1)
	if err != nil {
		t.Fatal(err)
	}
	c, err := host.Dial(timeout(t), 1)
	if err != nil {
		t.Fatal(err)
	}
	if err := host.Reason(); err != nil {
		t.Errorf("reason of an end that has not come: %v", err)
	}
	_ = host.Close()
	<-guest.Done()
	if err := host.Reason(); err != nil {
		t.Errorf("reason after Close: %v", err)
	}
	if err := guest.Reason(); !errors.Is(err, io.EOF) {
		t.Errorf("reason of the other side: %v, want %v", err, io.EOF)
	}
	if _, err := c.Read(make([]byte, 1)); err == nil {
		t.Error("read from an ended session")
	}
	for range 2 { // the connection that was queued may come first
		if _, err = l.Accept(); err != nil {
			break
		}
	}
	if !errors.Is(err, net.ErrClosed) {
		t.Errorf("accept: %v", err)
	}
	if _, err := guest.Dial(timeout(t), 1); !errors.Is(err, ErrClosed) {
		t.Errorf("dial: %v", err)
	}
	if _, err := guest.Listen(2); !errors.Is(err, ErrClosed) {
		t.Errorf("listen: %v", err)
	}
}

func TestCloseEndsAWaitingRead(t *testing.T) {
	host, guest := sessions(t)
	l, err := guest.Listen(1)
	if err != nil {
		t.Fatal(err)
	}
	c, err := host.Dial(timeout(t), 1)
	if err != nil {
		t.Fatal(err)
	}
	other, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { _, err := c.Read(make([]byte, 1)); ended <- err }()
	time.Sleep(10 * time.Millisecond)
	_ = c.Close()
	if err := <-ended; !errors.Is(err, net.ErrClosed) {
		t.Errorf("read after close: %v", err)
	}
	if _, err := other.Read(make([]byte, 1)); err != io.EOF {
		t.Errorf("the other end: %v", err)
	}
}

func TestDialWaitsForAFreeConnection(t *testing.T) {
	host, guest := sessions(t)
	l, err := guest.Listen(1)
	if err != nil {
		t.Fatal(err)
	}
	go echo(l)
	open := make([]net.Conn, maxOutgoing)
	for i := range open {
		if open[i], err = host.Dial(timeout(t), 1); err != nil {
			t.Fatal(err)
		}
	}
	short, cancel := context.WithTimeout(context.Background(), 30*time.Millisecond)
	defer cancel()
	if _, err := host.Dial(short, 1); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("dial beyond the limit: %v", err)
	}
	for _, c := range open {
		_ = c.Close()
	}
	for range 3 * maxOutgoing {
		c, err := host.Dial(timeout(t), 1)
		if err != nil {
			t.Fatal(err)
		}
		_ = c.Close()
	}
}

func TestManyDialersAreNeverRefused(t *testing.T) {
	host, guest := sessions(t)
	l, err := guest.Listen(1)
	if err != nil {
		t.Fatal(err)
	}
	go func() { // closes late what the other side has closed
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				_, _ = io.Copy(io.Discard, c)
				time.Sleep(5 * time.Millisecond)
				_ = c.Close()
			}()
		}
	}()
	var wg sync.WaitGroup
	for range 400 {
		wg.Go(func() {
			c, err := host.Dial(timeout(t), 1)
			if err != nil {
				t.Error(err)
				return
			}
			_ = c.Close()
		})
	}
	wg.Wait()
}

// raw greets as a host that then says what it likes.
func raw(t *testing.T) (net.Conn, *Session) {
	t.Helper()
	h, g := line(t)
	nonce := [nonceSize]byte{7}
	_, _ = h.Write(record{kindHello, nonce}.bytes())
	_, _ = h.Write(record{kindBegin, nonce}.bytes())
	guest, err := Guest(g)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = guest.Close() })
	return h, guest
}

func frame(kind byte, flags uint16, stream, length uint32) []byte {
	b := make([]byte, frameHeader)
	b[1] = kind
	binary.BigEndian.PutUint16(b[2:], flags)
	binary.BigEndian.PutUint32(b[4:], stream)
	binary.BigEndian.PutUint32(b[8:], length)
	return b
}

func TestHostilePeerLosesItsSession(t *testing.T) {
	flood := func(flags uint16) []byte {
		var all []byte
		for i := range uint32(4 * maxStreams) {
			all = append(all, frame(frameWindow, flags, 2*i+1, 0)...)
		}
		return all
	}
	for name, bytes := range map[string][]byte{
		"not a frame":       []byte("GET / HTTP/1.1\r\n\r\n"),
		"ping":              frame(framePing, 1, 0, 1),
		"frame too long":    frame(frameData, 1, 1, 1<<31),
		"window too large":  frame(frameWindow, 1, 1, 1<<31),
		"unknown type":      frame(9, 0, 0, 0),
		"duplicate stream":  append(frame(frameWindow, 1, 1, 0), frame(frameWindow, 1, 1, 0)...),
		"flood of openings": flood(1),
	} {
		t.Run(name, func(t *testing.T) {
			h, guest := raw(t)
			go func() { _, _ = io.Copy(io.Discard, h) }()
			_, _ = h.Write(bytes)
			for i := 0; name == "flood of openings" && i < 200; i++ { // in waves, since the backlog resets some
				if _, err := h.Write(frame(frameWindow, 1, uint32(100_001+2*i), 0)); err != nil {
					break
				}
				time.Sleep(time.Millisecond)
			}
			select {
			case <-guest.Done():
			case <-time.After(5 * time.Second):
				t.Fatal("the session lives")
			}
			if guest.Reason() == nil {
				t.Error("the session has ended for no reason")
			}
		})
	}
}

func FuzzGreeting(f *testing.F) {
	nonce := [nonceSize]byte{3}
	f.Add(record{kindAnswer, nonce}.bytes())
	f.Add(append([]byte("\xe5EPHRUN\xe5EPHRUN"), record{kindAnswer, nonce}.bytes()...))
	f.Fuzz(func(t *testing.T, data []byte) {
		var sent bytes.Buffer
		if s, err := Guest(duplex{bytes.NewReader(data), &sent}); err == nil {
			_ = s.Close()
		}
		// Whatever came before it, a whole session start is found, unless the noise ends with a record's beginning.
		tail := append(bytes.Repeat([]byte{0}, recordSize), record{kindHello, nonce}.bytes()...)
		tail = append(tail, record{kindBegin, nonce}.bytes()...)
		s, err := Guest(duplex{bytes.NewReader(append(bytes.Clone(data), tail...)), &sent})
		if err != nil {
			t.Fatalf("greeting not found: %v", err)
		}
		_ = s.Close()
	})
}

func FuzzFrames(f *testing.F) {
	f.Add(append(frame(frameWindow, 1, 1, 0), frame(frameData, 0, 1, 4)...))
	f.Add(frame(frameAway, 0, 0, 2))
	f.Fuzz(func(t *testing.T, data []byte) {
		whole, split := &guard{}, &guard{}
		err := whole.check(data)
		for i := range data {
			if serr := split.check(data[i : i+1]); serr != nil {
				if err == nil {
					t.Fatalf("split: %v, whole: none", serr)
				}
				return
			}
		}
		if err != nil {
			t.Fatalf("whole: %v, split: none", err)
		}
	})
}

type duplex struct {
	io.Reader
	io.Writer
}

func (duplex) Close() error { return nil }

func TestTooManyConnectionsAreRefused(t *testing.T) {
	h, guest := raw(t)
	if _, err := guest.Listen(1); err != nil {
		t.Fatal(err)
	}
	config := yamux.DefaultConfig()
	config.LogOutput = io.Discard
	config.EnableKeepAlive = false
	if _, err := io.ReadFull(h, make([]byte, recordSize)); err != nil { // the answer to the greeting
		t.Fatal(err)
	}
	greedy, err := yamux.Client(h, config)
	if err != nil {
		t.Fatal(err)
	}
	defer greedy.Close()
	for i := range maxIncoming + 1 {
		stream, err := greedy.OpenStream()
		if err != nil {
			t.Fatal(err)
		}
		_ = stream.SetDeadline(time.Now().Add(10 * time.Second))
		_, _ = stream.Write([]byte{0, 0, 0, 1})
		answer := []byte{9}
		n, err := io.ReadFull(stream, answer)
		if i < maxIncoming && (err != nil || answer[0] != accepted) || i == maxIncoming && n != 0 {
			t.Fatalf("connection %d: %d, %v", i, answer, err)
		}
	}
}
