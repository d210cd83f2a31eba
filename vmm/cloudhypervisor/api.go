package cloudhypervisor

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Limits of the API: those of the server, and what is read of its answers.
const (
	maxRequest = 51_200  // bytes of a body, through v53
	maxFiles   = 253     // descriptors with one message, SCM_MAX_FD
	maxReply   = 4 << 20 // bytes of a body
	maxHeader  = 64 << 10
	maxCauses  = 32
	maxCause   = 512 // bytes
	// callTimeout bounds a call whose caller is more patient. The longest, a snapshot of much memory, takes seconds.
	callTimeout = 2 * time.Minute
)

// APIError is a call that the API refused.
type APIError struct {
	Call   string   // e.g. "vm.restore"
	Status int      // of HTTP
	Causes []string // from the outermost to the root
}

// Error names call, status and all causes.
func (e *APIError) Error() string {
	causes := strings.Join(e.Causes, ": ")
	if causes == "" {
		causes = http.StatusText(e.Status)
	}
	return fmt.Sprintf("%s: status %d: %s", e.Call, e.Status, causes)
}

// says tells whether one of the causes holds text.
func (e *APIError) says(text string) bool {
	for _, c := range e.Causes {
		if strings.Contains(c, text) {
			return true
		}
	}
	return false
}

// client talks to the API of one process, one call at a time, as the server does. It keeps one connection.
type client struct {
	dial func(ctx context.Context) (*net.UnixConn, error)

	turn chan struct{} // one token, which a call takes

	mu     sync.Mutex
	closed bool
	conn   *net.UnixConn // changed by the owner of turn, and by close
}

var errClientClosed = errors.New("API client closed")

func newClient(dial func(ctx context.Context) (*net.UnixConn, error)) *client {
	return &client{dial: dial, turn: make(chan struct{}, 1)}
}

// close ends the call in progress and all later ones.
func (c *client) close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	if c.conn != nil {
		_ = c.conn.Close()
		c.conn = nil
	}
}

// get asks for something.
func (c *client) get(ctx context.Context, call string, answer any) error {
	return c.call(ctx, http.MethodGet, call, nil, nil, answer)
}

// put does something; body may be nil.
func (c *client) put(ctx context.Context, call string, body any) error {
	return c.call(ctx, http.MethodPut, call, body, nil, nil)
}

// putFiles is put with descriptors for the server.
func (c *client) putFiles(ctx context.Context, call string, body any, files ...int) error {
	return c.call(ctx, http.MethodPut, call, body, files, nil)
}

// call makes one request. Its connection is used again only after a complete answer. An interrupted call may still be
// carried out.
func (c *client) call(ctx context.Context, method, call string, body any, files []int, answer any) error {
	request, err := encode(method, call, body)
	if err == nil && len(files) > maxFiles {
		err = fmt.Errorf("%d descriptors, at most %d", len(files), maxFiles)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", call, err)
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	select {
	case c.turn <- struct{}{}:
	case <-ctx.Done():
		return fmt.Errorf("%s: wait for an earlier call: %w", call, context.Cause(ctx))
	}
	defer func() { <-c.turn }()
	err = c.exchange(ctx, call, request, files, answer)
	if err == nil {
		return nil
	}
	var refused *APIError
	if errors.As(err, &refused) {
		return err
	}
	c.drop()
	if ctx.Err() != nil { // the deadline that was set on the connection, for example
		err = context.Cause(ctx)
	}
	return fmt.Errorf("%s: %w", call, err)
}

// encode makes the bytes of a request.
func encode(method, call string, body any) ([]byte, error) {
	var content []byte
	if body != nil {
		var err error
		if content, err = json.Marshal(body); err != nil {
			return nil, err
		}
	}
	if len(content) > maxRequest {
		return nil, fmt.Errorf("a request of %d bytes, at most %d", len(content), maxRequest)
	}
	var b bytes.Buffer
	fmt.Fprintf(&b, "%s /api/v1/%s HTTP/1.1\r\nHost: localhost\r\nAccept: application/json\r\n", method, call)
	if body != nil {
		fmt.Fprintf(&b, "Content-Type: application/json\r\nContent-Length: %d\r\n", len(content))
	}
	b.WriteString("\r\n")
	b.Write(content)
	return b.Bytes(), nil
}

// exchange sends a request and reads the answer. It runs in a turn.
func (c *client) exchange(ctx context.Context, call string, request []byte, files []int, answer any) error {
	conn, err := c.connect(ctx)
	if err != nil {
		return err
	}
	if err := conn.SetDeadline(time.Time{}); err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	if err := send(conn, request, files); err != nil {
		return err
	}
	status, content, last, err := receive(conn)
	if err != nil {
		return err
	}
	if last {
		c.drop()
	}
	if status >= 300 {
		return &APIError{Call: call, Status: status, Causes: causes(content)}
	}
	if answer == nil {
		return nil
	}
	if err := json.Unmarshal(content, answer); err != nil {
		return fmt.Errorf("read answer: %w", err)
	}
	return nil
}

func (c *client) connect(ctx context.Context) (*net.UnixConn, error) {
	c.mu.Lock()
	conn, closed := c.conn, c.closed
	c.mu.Unlock()
	if closed {
		return nil, errClientClosed
	}
	if conn != nil {
		return conn, nil
	}
	conn, err := c.dial(ctx)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		_ = conn.Close()
		return nil, errClientClosed
	}
	c.conn = conn
	return conn, nil
}

// drop gives up the connection: what comes over it may belong to an earlier call.
func (c *client) drop() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.conn != nil {
		_ = c.conn.Close()
		c.conn = nil
	}
}

// send writes a request with descriptors. They travel with its first byte.
func send(conn *net.UnixConn, request []byte, files []int) error {
	var rights []byte
	if len(files) > 0 {
		rights = unix.UnixRights(files...)
	}
	n, _, err := conn.WriteMsgUnix(request, rights, nil)
	if err == nil && n < len(request) {
		_, err = conn.Write(request[n:])
	}
	return err
}

// receive reads one answer: its status, its body, and whether the connection is of no more use.
func receive(from io.Reader) (status int, content []byte, last bool, err error) {
	buffered := bufio.NewReader(io.LimitReader(from, maxHeader+maxReply))
	answer, err := http.ReadResponse(buffered, nil)
	if err != nil {
		return 0, nil, true, fmt.Errorf("read answer: %w", err)
	}
	defer func() { _ = answer.Body.Close() }()
	if answer.StatusCode >= 200 && answer.ContentLength < 0 && answer.StatusCode != http.StatusNoContent {
		return 0, nil, true, errors.New("an answer of unknown length")
	}
	content, err = io.ReadAll(io.LimitReader(answer.Body, maxReply+1))
	if err != nil {
		return 0, nil, true, fmt.Errorf("read answer: %w", err)
	}
	if len(content) > maxReply {
		return 0, nil, true, fmt.Errorf("an answer of more than %d bytes", maxReply)
	}
	// What follows an answer answers nothing.
	return answer.StatusCode, content, buffered.Buffered() > 0 || answer.Close, nil
}

// causes reads the list of errors in a refusal, bounded. Errors of the HTTP server itself come as an object.
func causes(content []byte) []string {
	var list []string
	if json.Unmarshal(content, &list) != nil {
		var one struct {
			Error string `json:"error"`
		}
		if json.Unmarshal(content, &one) != nil || one.Error == "" {
			one.Error = string(content)
		}
		list = []string{one.Error}
	}
	if len(list) > maxCauses {
		list = list[len(list)-maxCauses:] // the root is last
	}
	for i, text := range list {
		if len(text) > maxCause {
			text = text[:maxCause]
		}
		list[i] = strings.ToValidUTF8(strings.TrimSpace(text), "?")
	}
	return list
}
