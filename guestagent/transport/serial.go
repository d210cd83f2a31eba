package transport

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ephemeral-run/ephemeral/guestagent/proto"
	"github.com/ephemeral-run/ephemeral/guestagent/proto/mux"
)

// FindPort returns the device of the virtio-serial port with the name. The port's number varies with the devices a
// machine has. It waits for the driver to make it until ctx ends.
func FindPort(ctx context.Context, name string) (string, error) {
	const class = "/sys/class/virtio-ports"
	for {
		entries, err := os.ReadDir(class)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return "", fmt.Errorf("find serial port: %w", err)
		}
		for _, entry := range entries {
			got, err := os.ReadFile(filepath.Join(class, entry.Name(), "name"))
			if err == nil && strings.TrimSpace(string(got)) == name {
				return filepath.Join("/dev", entry.Name()), nil
			}
		}
		select {
		case <-ctx.Done():
			return "", fmt.Errorf("find serial port %q: %w", name, ctx.Err())
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// Serial is the transport over a serial port. It serves one host session after the other until Close.
type Serial struct {
	port Port
	log  *slog.Logger

	connections chan net.Conn
	stop        chan struct{}
	stopped     chan struct{}
	closeOnce   sync.Once

	mu      sync.Mutex
	session *mux.Session
}

// Port is the serial port: reads end with io.EOF while no host is connected.
type Port interface {
	io.ReadWriter
	SetDeadline(t time.Time) error // in the past: ends reads and writes that wait
	Wait() error                   // returns when a host may have connected
	Close() error
}

// NewSerial starts to serve sessions on the port, which it owns from then on.
func NewSerial(port Port, log *slog.Logger) *Serial {
	s := &Serial{port: port, log: log, connections: make(chan net.Conn), stop: make(chan struct{}), stopped: make(chan struct{})}
	go s.run()
	return s
}

// Name is "serial".
func (s *Serial) Name() string { return "serial" }

// Close ends the session and closes the port.
func (s *Serial) Close() error {
	s.closeOnce.Do(func() {
		close(s.stop)
		_ = s.port.SetDeadline(time.Unix(1, 0))
		s.mu.Lock()
		if s.session != nil {
			go s.session.Close() // run waits for its end
		}
		s.mu.Unlock()
	})
	<-s.stopped
	return s.port.Close()
}

func (s *Serial) ending() bool {
	select {
	case <-s.stop:
		return true
	default:
		return false
	}
}

func (s *Serial) run() {
	defer close(s.stopped)
	for !s.ending() {
		if err := s.port.SetDeadline(time.Time{}); err != nil {
			s.log.Error("reset serial port", "error", err)
		}
		if s.ending() {
			return
		}
		session, err := mux.Guest(line{s.port}, proto.AgentPort)
		if err == nil {
			err = s.serve(session)
		}
		if err != nil && !errors.Is(err, io.EOF) && !s.ending() {
			s.log.Warn("serial session ended", "error", err)
		}
		if err := s.port.Wait(); err != nil && !s.ending() {
			s.log.Error("wait for host", "error", err)
			time.Sleep(10 * time.Millisecond)
		}
	}
}

// serve hands out the connections of one session until it ends.
func (s *Serial) serve(session *mux.Session) error {
	defer session.Close()
	listener, err := session.Listen(proto.AgentPort)
	if err != nil {
		return err
	}
	s.setSession(session)
	defer s.setSession(nil)
	for {
		c, err := listener.Accept()
		if err != nil {
			return nil
		}
		select {
		case s.connections <- c:
		case <-session.Done():
			_ = c.Close()
		case <-s.stop:
			_ = c.Close()
			return nil
		}
	}
}

func (s *Serial) setSession(session *mux.Session) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.session = session
}

// Dial connects to a port of the host. ErrNoHost without a session.
func (s *Serial) Dial(ctx context.Context, port uint32) (net.Conn, error) {
	s.mu.Lock()
	session := s.session
	s.mu.Unlock()
	if session == nil {
		return nil, fmt.Errorf("dial host port %d: %w", port, ErrNoHost)
	}
	return session.Dial(ctx, port)
}

// Listen hands out the connections of all sessions.
func (s *Serial) Listen() (net.Listener, error) { return serialListener{s}, nil }

type serialListener struct{ s *Serial }

func (l serialListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.s.connections:
		return c, nil
	case <-l.s.stop:
		return nil, net.ErrClosed
	}
}

// Close is that of the transport.
func (l serialListener) Close() error   { return l.s.Close() }
func (l serialListener) Addr() net.Addr { return serialAddr{} }

type serialAddr struct{}

func (serialAddr) Network() string { return "serial" }
func (serialAddr) String() string  { return proto.SerialPort }

// line lets a session end without the port being closed: reopening it would throw away what the next host has sent.
type line struct{ Port }

func (l line) Close() error { return l.SetDeadline(time.Unix(1, 0)) }

// OpenPort opens the device of a virtio-serial port. A port can be open once only.
func OpenPort(path string) (Port, error) {
	file, err := os.OpenFile(path, os.O_RDWR|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open serial port: %w", err)
	}
	if err := file.SetDeadline(time.Time{}); err != nil {
		return nil, errors.Join(fmt.Errorf("poll serial port: %w", err), file.Close())
	}
	poll, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("poll serial port: %w", err), file.Close())
	}
	if err := watch(file, poll); err != nil {
		return nil, errors.Join(fmt.Errorf("poll serial port: %w", err), unix.Close(poll), file.Close())
	}
	return &devicePort{File: file, poll: poll}, nil
}

func watch(file *os.File, poll int) error {
	raw, err := file.SyscallConn()
	if err != nil {
		return err
	}
	var added error
	if err := raw.Control(func(fd uintptr) {
		added = unix.EpollCtl(poll, unix.EPOLL_CTL_ADD, int(fd), &unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLET})
	}); err != nil {
		return err
	}
	return added
}

// devicePort waits for a host by edge-triggered polling: without a host the port is always readable, reading end of
// file, but it wakes those who poll it when the first bytes of one arrive, drivers/char/virtio_console.c.
type devicePort struct {
	*os.File
	poll int
}

// waitAtMost bounds the wait for an edge that came before the poll.
const waitAtMost = 50 * time.Millisecond

func (p *devicePort) Wait() error {
	var events [1]unix.EpollEvent
	_, err := unix.EpollWait(p.poll, events[:], int(waitAtMost.Milliseconds()))
	if err != nil && !errors.Is(err, unix.EINTR) {
		return fmt.Errorf("wait for host: %w", err)
	}
	return nil
}

func (p *devicePort) Close() error { return errors.Join(unix.Close(p.poll), p.File.Close()) }
