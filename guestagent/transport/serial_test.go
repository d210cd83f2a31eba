package transport

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/ephemeral-run/ephemeral/guestagent/proto"
	"github.com/ephemeral-run/ephemeral/guestagent/proto/mux"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// port is a serial port whose hosts come and go: without one, reads are at their end at once.
type port struct {
	mu       sync.Mutex
	line     net.Conn // nil: no host
	deadline time.Time
	arrived  chan struct{}
}

func (p *port) current() net.Conn {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.line
}

func (p *port) Read(b []byte) (int, error) {
	if c := p.current(); c != nil {
		return c.Read(b)
	}
	return 0, io.EOF
}

func (p *port) Write(b []byte) (int, error) {
	if c := p.current(); c != nil {
		return c.Write(b)
	}
	return 0, os.ErrDeadlineExceeded
}

func (p *port) SetDeadline(t time.Time) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.deadline = t
	if p.line != nil {
		return p.line.SetDeadline(t)
	}
	return nil
}

func (p *port) Wait() error {
	select {
	case <-p.arrived:
	case <-time.After(20 * time.Millisecond):
	}
	return nil
}

func (p *port) Close() error {
	if c := p.current(); c != nil {
		return c.Close()
	}
	return nil
}

// attach gives the port a host and returns its end of the line.
func (p *port) attach(t *testing.T) net.Conn {
	t.Helper()
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC|syscall.SOCK_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	var ends [2]net.Conn
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "line")
		if ends[i], err = net.FileConn(f); err != nil {
			t.Fatal(err)
		}
		_ = f.Close()
		t.Cleanup(func() { _ = ends[i].Close() })
	}
	p.mu.Lock()
	p.line = ends[1]
	_ = p.line.SetDeadline(p.deadline)
	p.mu.Unlock()
	select {
	case p.arrived <- struct{}{}:
	default:
	}
	return ends[0]
}

func newSerial(t *testing.T) (*Serial, *port) {
	t.Helper()
	p := &port{arrived: make(chan struct{}, 1)}
	s := NewSerial(p, slog.New(slog.DiscardHandler))
	t.Cleanup(func() { _ = s.Close() })
	return s, p
}

func limit(t *testing.T) context.Context {
	c, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	t.Cleanup(cancel)
	return c
}

func TestOneHostAfterTheOther(t *testing.T) {
	s, p := newSerial(t)
	if _, err := s.Dial(limit(t), proto.BrokerPort); !errors.Is(err, ErrNoHost) {
		t.Errorf("dial without a host: %v", err)
	}
	listener, err := s.Listen()
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan struct{})
	go func() { // an agent that repeats what it hears
		defer close(served)
		for {
			c, err := listener.Accept()
			if err != nil {
				return
			}
			go func() { _, _ = io.Copy(c, c); _ = c.Close() }()
		}
	}()
	for range 5 {
		host, err := mux.Host(limit(t), p.attach(t))
		if err != nil {
			t.Fatal(err)
		}
		c, err := host.Dial(limit(t), proto.AgentPort)
		if err != nil {
			t.Fatal(err)
		}
		_ = c.SetDeadline(time.Now().Add(10 * time.Second))
		answer := make([]byte, 5)
		if _, err := c.Write([]byte("hello")); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(c, answer); err != nil || string(answer) != "hello" {
			t.Fatalf("%q, %v", answer, err)
		}
		broker, err := host.Listen(proto.BrokerPort)
		if err != nil {
			t.Fatal(err)
		}
		go func() {
			if c, err := broker.Accept(); err == nil {
				_ = c.Close()
			}
		}()
		up, err := s.Dial(limit(t), proto.BrokerPort)
		if err != nil {
			t.Fatal(err)
		}
		_ = up.Close()
		_ = host.Close() // the host goes in the middle of a connection
	}
	_ = s.Close()
	<-served
}

func TestHostThatTalksNonsense(t *testing.T) {
	_, p := newSerial(t)
	line := p.attach(t)
	if _, err := line.Write([]byte("AT\r\nAT\r\n\x00\x01\x02")); err != nil {
		t.Fatal(err)
	}
	host, err := mux.Host(limit(t), line)
	if err != nil {
		t.Fatal(err)
	}
	defer host.Close()
	c, err := host.Dial(limit(t), proto.AgentPort)
	if err != nil {
		t.Fatal(err)
	}
	_ = c.Close()
}

func TestCloseWhileAHostIsThere(t *testing.T) {
	s, p := newSerial(t)
	host, err := mux.Host(limit(t), p.attach(t))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := host.Dial(limit(t), proto.AgentPort); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	<-host.Done()
	listener, _ := s.Listen()
	if _, err := listener.Accept(); !errors.Is(err, net.ErrClosed) {
		t.Errorf("accept: %v", err)
	}
}
