package qemu

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// maxMessage bounds one message of QEMU, in bytes. The longest it sends here has a few thousand.
const maxMessage = 256 << 10

// errMonitor: QEMU sent what is no QMP. The machine cannot be trusted any further.
var errMonitor = errors.New("invalid QMP message")

// monitor is a client of QEMU's machine protocol over a connected socket.
// See https://www.qemu.org/docs/master/interop/qmp-spec.html.
type monitor struct {
	conn    *net.UnixConn
	onEvent func(event)
	ready   chan struct{} // closed when the greeting came
	done    chan struct{} // closed when the connection ended

	write sync.Mutex // one command at a time on the wire
	// passing has one token for a command with descriptors, until it is answered: QEMU keeps those that came last.
	passing chan struct{}

	mu      sync.Mutex
	next    uint64
	pending map[uint64]chan message
	err     error // why the connection ended
}

// message is anything QEMU sends: greeting, answer or event.
type message struct {
	Greeting json.RawMessage `json:"QMP"`
	Event    string          `json:"event"`
	Data     json.RawMessage `json:"data"`
	Return   json.RawMessage `json:"return"`
	Error    *struct {
		Class string `json:"class"`
		Desc  string `json:"desc"`
	} `json:"error"`
	ID *uint64 `json:"id"`
}

// event is something that happened to the machine by itself.
type event struct {
	name string
	data json.RawMessage
}

// commandError is QEMU's refusal of a command.
type commandError struct {
	command, class, desc string
}

func (e *commandError) Error() string {
	return fmt.Sprintf("qmp %s: %s (%s)", e.command, e.desc, e.class)
}

// newMonitor starts to read from conn, which it owns. onEvent is called in order on the reading goroutine and must not
// block.
func newMonitor(conn *net.UnixConn, onEvent func(event)) *monitor {
	m := &monitor{
		conn:    conn,
		onEvent: onEvent,
		ready:   make(chan struct{}),
		done:    make(chan struct{}),
		passing: make(chan struct{}, 1),
		pending: make(map[uint64]chan message),
	}
	go m.read()
	return m
}

// read ends with the connection.
func (m *monitor) read() {
	err := m.readAll(m.conn)
	_ = m.conn.Close()
	m.mu.Lock()
	m.err = err
	m.mu.Unlock()
	close(m.done)
}

func (m *monitor) readAll(r io.Reader) error {
	lines := bufio.NewReaderSize(r, 4096)
	greeted := false
	for {
		line, err := readLine(lines, maxMessage)
		if err != nil {
			return err
		}
		var got message
		if err := json.Unmarshal(line, &got); err != nil {
			return fmt.Errorf("%w: %w", errMonitor, err)
		}
		switch {
		case got.Greeting != nil && !greeted:
			greeted = true
			close(m.ready)
		case got.Event != "":
			m.onEvent(event{got.Event, got.Data})
		case got.ID != nil && (got.Return != nil || got.Error != nil):
			m.answer(*got.ID, got)
		default:
			return fmt.Errorf("%w: neither event nor answer", errMonitor)
		}
	}
}

// readLine returns the next line, without its end, of at most limit bytes.
func readLine(r *bufio.Reader, limit int) ([]byte, error) {
	var line []byte
	for {
		part, err := r.ReadSlice('\n')
		line = append(line, part...)
		if len(line) > limit {
			return nil, fmt.Errorf("%w: longer than %d bytes", errMonitor, limit)
		}
		if err == nil {
			return bytes.TrimSpace(line), nil
		}
		if !errors.Is(err, bufio.ErrBufferFull) {
			return nil, err
		}
	}
}

func (m *monitor) answer(id uint64, got message) {
	m.mu.Lock()
	waiter := m.pending[id]
	delete(m.pending, id)
	m.mu.Unlock()
	if waiter != nil { // else: given up by its caller, or made up by QEMU
		waiter <- got
	}
}

// handshake waits for the greeting and enables commands.
func (m *monitor) handshake(ctx context.Context) error {
	select {
	case <-m.ready:
	case <-m.done:
		return m.lost()
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	return m.execute(ctx, "qmp_capabilities", nil)
}

// execute runs a command and waits for its answer, whose content is not wanted. Files travel with it, for commands that
// take descriptors. Errors: *commandError, a lost connection, the cause of ctx.
func (m *monitor) execute(ctx context.Context, command string, arguments any, files ...*os.File) error {
	return m.query(ctx, nil, command, arguments, files...)
}

// query is execute with the content of the answer put into out.
func (m *monitor) query(ctx context.Context, out any, command string, arguments any, files ...*os.File) error {
	if len(files) > 0 {
		select {
		case m.passing <- struct{}{}:
			defer func() { <-m.passing }()
		case <-ctx.Done():
			return fmt.Errorf("qmp %s: %w", command, context.Cause(ctx))
		}
	}
	waiter := make(chan message, 1)
	m.mu.Lock()
	m.next++
	id := m.next
	m.pending[id] = waiter
	m.mu.Unlock()
	defer func() {
		m.mu.Lock()
		delete(m.pending, id)
		m.mu.Unlock()
	}()
	err := m.send(id, command, arguments, files)
	if errors.Is(err, net.ErrClosed) { // closed on this side, by or for the reader, who knows why
		<-m.done
		err = m.lost()
	}
	if err != nil {
		return fmt.Errorf("qmp %s: %w", command, err)
	}
	select {
	case got := <-waiter:
		if got.Error != nil {
			return &commandError{command, got.Error.Class, got.Error.Desc}
		}
		if out == nil {
			return nil
		}
		if err := json.Unmarshal(got.Return, out); err != nil {
			return fmt.Errorf("qmp %s: %w: %w", command, errMonitor, err)
		}
		return nil
	case <-m.done:
		return fmt.Errorf("qmp %s: %w", command, m.lost())
	case <-ctx.Done():
		return fmt.Errorf("qmp %s: %w", command, context.Cause(ctx))
	}
}

// send writes one command. It does not wait for room: commands are small and rare, and QEMU that lets the socket fill
// up does not answer either.
func (m *monitor) send(id uint64, command string, arguments any, files []*os.File) error {
	text, err := json.Marshal(struct {
		Execute   string `json:"execute"`
		Arguments any    `json:"arguments,omitempty"`
		ID        uint64 `json:"id"`
	}{command, arguments, id})
	if err != nil {
		return err
	}
	var rights []byte
	if len(files) > 0 {
		fds := make([]int, len(files))
		for i, f := range files {
			fds[i] = int(f.Fd())
		}
		rights = unix.UnixRights(fds...)
	}
	m.write.Lock()
	defer m.write.Unlock()
	_, _, err = m.conn.WriteMsgUnix(append(text, '\n'), rights, nil)
	return err
}

// lost says why the connection ended, as an error for the caller of a command.
func (m *monitor) lost() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.err == nil || errors.Is(m.err, io.EOF) {
		return errors.New("QEMU closed its monitor")
	}
	return fmt.Errorf("monitor: %w", m.err)
}

// close ends the connection and waits for the reader.
func (m *monitor) close() {
	_ = m.conn.Close()
	<-m.done
}
