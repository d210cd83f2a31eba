// Package mux carries the ports of a machine over one serial line, where there is no vsock: a greeting that finds the
// start of a session in whatever the line still holds, then one yamux stream a connection, each beginning with the port
// it is meant for.
//
// Both ends treat the other as hostile: what it sends is bounded, and breaking the rules ends its session, nothing else.
package mux

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/yamux"
)

const (
	// maxIncoming and maxOutgoing bound the connections open at once, by who opened them. A stream buffers at most
	// 256 KiB, so a peer can make this side hold 32 MiB and the backlog.
	maxIncoming = 64
	maxOutgoing = 64
	// maxStreams is where a session ends: its peer opens streams without regard to refusals.
	maxStreams = maxIncoming + maxOutgoing + streamBacklog
	// streamBacklog bounds the streams that wait for their port header.
	streamBacklog = 64
	// listenBacklog bounds the connections that wait for Accept, per port.
	listenBacklog = maxIncoming
	// headerTimeout is how long the opener of a stream may take to name the port.
	headerTimeout = 10 * time.Second
	// lingerPoll is how often Dial looks whether the peer has closed what this side has closed.
	lingerPoll = 5 * time.Millisecond
)

// The one-byte answer to a port header.
const (
	accepted byte = 0
	refused  byte = 1
)

var (
	// ErrRefused: nobody listens on the port, or its backlog is full.
	ErrRefused = errors.New("connection refused")
	// ErrClosed: the session has ended.
	ErrClosed = errors.New("session closed")
	// ErrPortInUse: the port has a listener already.
	ErrPortInUse = errors.New("port in use")
	// ErrProtocol: the peer broke the rules of the line.
	ErrProtocol = errors.New("protocol violation")
)

// Session is one host's stay on the line. It owns the line and closes it when it ends.
type Session struct {
	yamux   *yamux.Session
	slots   chan struct{} // one token a connection opened by Dial
	opening chan struct{} // one token while a stream is being opened
	wg      sync.WaitGroup
	over    chan struct{} // closed when reason says why the session has ended
	reason  error

	mu        sync.Mutex
	listeners map[uint32]*listener
	incoming  int
	closed    bool
}

// start runs yamux over an established line.
func start(line io.ReadWriteCloser, host bool, ports []uint32) (*Session, error) {
	config := yamux.DefaultConfig()
	config.EnableKeepAlive = false // a paused machine answers nothing and is not dead
	config.LogOutput = io.Discard
	config.AcceptBacklog = streamBacklog
	config.StreamCloseTimeout = time.Minute
	guarded := &guard{ReadWriteCloser: line}
	open := yamux.Server
	if host {
		open = yamux.Client
	}
	inner, err := open(guarded, config)
	if err != nil {
		return nil, fmt.Errorf("start session: %w", err)
	}
	s := &Session{
		yamux: inner, slots: make(chan struct{}, maxOutgoing), opening: make(chan struct{}, 1),
		over: make(chan struct{}), listeners: make(map[uint32]*listener),
	}
	for _, port := range ports {
		s.listeners[port] = s.newListener(port)
	}
	s.wg.Add(1)
	go s.accept()
	return s, nil
}

// Done is closed when the session has ended.
func (s *Session) Done() <-chan struct{} { return s.yamux.CloseChan() }

// Reason says why the session has ended; nil while it lives and after Close.
func (s *Session) Reason() error {
	if !s.yamux.IsClosed() {
		return nil
	}
	<-s.over
	if errors.Is(s.reason, yamux.ErrSessionShutdown) {
		return nil
	}
	return s.reason
}

// Close ends the session with all its connections and listeners, and closes the line. It is idempotent.
func (s *Session) Close() error {
	err := s.yamux.Close()
	s.closeListeners()
	s.wg.Wait()
	return err
}

func (s *Session) closeListeners() {
	s.mu.Lock()
	s.closed = true
	open := make([]*listener, 0, len(s.listeners))
	for _, l := range s.listeners {
		open = append(open, l)
	}
	s.mu.Unlock()
	for _, l := range open {
		_ = l.Close()
	}
}

// Dial connects to a port the other side listens on. With all connections in use it waits for one to be closed.
// Errors: ErrRefused, ErrClosed, or the cause of ctx.
func (s *Session) Dial(ctx context.Context, port uint32) (net.Conn, error) {
	select {
	case s.slots <- struct{}{}:
	case <-ctx.Done():
		return nil, fmt.Errorf("dial port %d: %w", port, context.Cause(ctx))
	case <-s.Done():
		return nil, fmt.Errorf("dial port %d: %w", port, ErrClosed)
	}
	release := func() { <-s.slots }
	stream, err := s.open(ctx)
	if err != nil {
		release()
		return nil, fmt.Errorf("dial port %d: %w", port, s.cause(err))
	}
	c := s.newConn(stream, release)
	if err := s.negotiate(ctx, stream, port); err != nil {
		_ = c.Close()
		return nil, fmt.Errorf("dial port %d: %w", port, err)
	}
	return c, nil
}

// open begins a stream. Those that this side has closed count until the peer has closed them too, so with too many of
// them it waits: the peer would refuse more.
func (s *Session) open(ctx context.Context) (*yamux.Stream, error) {
	select { // one at a time, so that the count holds until the stream is among the counted
	case s.opening <- struct{}{}:
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	case <-s.Done():
		return nil, ErrClosed
	}
	defer func() { <-s.opening }()
	for s.outgoing() >= maxOutgoing {
		select {
		case <-time.After(lingerPoll):
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-s.Done():
			return nil, ErrClosed
		}
	}
	return s.yamux.OpenStream()
}

func (s *Session) outgoing() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.yamux.NumStreams() - s.incoming
}

func (s *Session) negotiate(ctx context.Context, stream *yamux.Stream, port uint32) error {
	stop := context.AfterFunc(ctx, func() { _ = stream.SetDeadline(time.Unix(1, 0)) })
	var message [4]byte
	binary.BigEndian.PutUint32(message[:], port)
	_, err := stream.Write(message[:])
	if err == nil {
		_, err = io.ReadFull(stream, message[:1])
	}
	if !stop() {
		return context.Cause(ctx)
	}
	switch {
	case err != nil:
		return s.cause(err)
	case message[0] == accepted:
		return nil
	case message[0] == refused:
		return ErrRefused
	}
	return fmt.Errorf("%w: answer %d to a port header", ErrProtocol, message[0])
}

// cause replaces yamux's many ways to say that the session is over.
func (s *Session) cause(err error) error {
	if s.yamux.IsClosed() || errors.Is(err, io.EOF) || errors.Is(err, yamux.ErrConnectionReset) || errors.Is(err, yamux.ErrSessionShutdown) {
		return fmt.Errorf("%w: %w", ErrClosed, err)
	}
	return err
}

// accept takes the streams the peer opens until the session ends.
func (s *Session) accept() {
	defer s.wg.Done()
	for {
		stream, err := s.yamux.AcceptStream()
		if err != nil {
			s.reason = err
			break
		}
		if n := s.yamux.NumStreams(); n > maxStreams {
			s.reason = fmt.Errorf("%w: %d streams", ErrProtocol, n)
			_ = stream.Close()
			break
		}
		s.mu.Lock()
		full := s.incoming >= maxIncoming || s.closed
		if !full {
			s.incoming++
			s.wg.Add(1)
		}
		s.mu.Unlock()
		if full {
			_ = stream.Close()
			continue
		}
		c := s.newConn(stream, func() {
			s.mu.Lock()
			s.incoming--
			s.mu.Unlock()
		})
		go func() {
			defer s.wg.Done()
			s.route(c, stream)
		}()
	}
	close(s.over)
	_ = s.yamux.Close()
	s.closeListeners()
}

// route reads the port header of a stream and hands it to who listens there.
func (s *Session) route(c *conn, stream *yamux.Stream) {
	_ = stream.SetDeadline(time.Now().Add(headerTimeout))
	var header [4]byte
	if _, err := io.ReadFull(stream, header[:]); err != nil {
		_ = c.Close()
		return
	}
	s.mu.Lock()
	l := s.listeners[binary.BigEndian.Uint32(header[:])]
	s.mu.Unlock()
	if l == nil || !l.reserve() {
		_, _ = stream.Write([]byte{refused})
		_ = c.Close()
		return
	}
	if _, err := stream.Write([]byte{accepted}); err != nil {
		l.unreserve()
		_ = c.Close()
		return
	}
	_ = stream.SetDeadline(time.Time{})
	l.deliver(c)
}

// conn is one stream. Its Close does not wait for the peer to take the goodbye.
type conn struct {
	*yamux.Stream
	session *Session
	closed  atomic.Bool
	release func()
}

func (s *Session) newConn(stream *yamux.Stream, release func()) *conn {
	return &conn{Stream: stream, session: s, release: release}
}

// Read fails with net.ErrClosed after Close, also when it was waiting.
func (c *conn) Read(p []byte) (int, error) {
	n, err := c.Stream.Read(p)
	return n, c.cause(err)
}

// Write fails with net.ErrClosed after Close.
func (c *conn) Write(p []byte) (int, error) {
	n, err := c.Stream.Write(p)
	return n, c.cause(err)
}

func (c *conn) cause(err error) error {
	if err != nil && c.closed.Load() {
		return net.ErrClosed
	}
	return err
}

// SessionReason is the Reason of the session that the connection belongs to.
func (c *conn) SessionReason() error { return c.session.Reason() }

// Close ends the connection in both directions. A peer that takes no bytes would hold the sending of the close for
// seconds, therefore that happens on a goroutine, which the end of the session also ends.
func (c *conn) Close() error {
	if c.closed.Swap(true) {
		return nil
	}
	c.release()
	_ = c.SetDeadline(time.Unix(1, 0)) // yamux lets readers wait on after a local close
	s := c.session
	s.mu.Lock()
	ended := s.closed
	if !ended {
		s.wg.Add(1)
	}
	s.mu.Unlock()
	if ended { // nothing is sent any more, so nothing can block
		return c.Stream.Close()
	}
	go func() {
		defer s.wg.Done()
		_ = c.Stream.Close()
	}()
	return nil
}
