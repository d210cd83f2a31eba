package chfake

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// Limits of the real server.
const (
	maxConnections = 10
	maxBody        = 51_200
)

// refusal is an error answer.
type refusal struct {
	status int
	causes []string
}

func (r *refusal) Error() string { return strings.Join(r.causes, ": ") }

// refuse is a refusal of the API behind the server.
func refuse(status int, causes ...string) error {
	return &refusal{status, append([]string{"Error from API"}, causes...)}
}

// peer is a connection with what came beside its bytes.
type peer struct {
	*net.UnixConn
	files []int
}

// Read keeps the descriptors that come with the bytes.
func (p *peer) Read(b []byte) (int, error) {
	oob := make([]byte, unix.CmsgSpace(4*253))
	n, oobn, _, _, err := p.ReadMsgUnix(b, oob)
	if err != nil {
		return n, err
	}
	messages, perr := unix.ParseSocketControlMessage(oob[:oobn])
	if perr != nil {
		return n, perr
	}
	for _, m := range messages {
		files, perr := unix.ParseUnixRights(&m)
		if perr != nil {
			return n, perr
		}
		p.files = append(p.files, files...)
	}
	if n == 0 {
		return 0, io.EOF
	}
	return n, nil
}

func (p *peer) closeFiles() {
	for _, fd := range p.files {
		_ = unix.Close(fd)
	}
	p.files = nil
}

// serve answers calls, one at a time, until the process is to end.
func (v *vmm) serve(l *net.UnixListener) error {
	var open atomic.Int32
	var turn sync.Mutex
	for {
		conn, err := l.AcceptUnix()
		if err != nil {
			return err
		}
		if open.Add(1) > maxConnections {
			_, _ = io.WriteString(conn, "HTTP/1.1 503 \r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
			_ = conn.Close()
			open.Add(-1)
			continue
		}
		go func() {
			defer open.Add(-1)
			p := &peer{UnixConn: conn}
			defer func() { _ = p.Close() }()
			reader := bufio.NewReader(p)
			for v.next(p, reader, &turn) {
			}
		}()
	}
}

// next answers one request. It returns whether another may follow.
func (v *vmm) next(p *peer, reader *bufio.Reader, turn *sync.Mutex) bool {
	request, err := http.ReadRequest(reader)
	if err != nil {
		return false
	}
	defer p.closeFiles()
	if request.ContentLength > maxBody {
		text := fmt.Sprintf("{ \"error\": \"Request payload with size %d is larger than the limit of %d allowed by server.\" }", request.ContentLength, maxBody)
		_ = reply(p, http.StatusBadRequest, []byte(text))
		return false
	}
	body, err := io.ReadAll(io.LimitReader(request.Body, maxBody))
	if err != nil {
		return false
	}
	turn.Lock()
	defer turn.Unlock()
	call := strings.TrimPrefix(request.URL.Path, "/api/v1/")
	fault := v.fault(call)
	if fault != nil && !v.before(p, *fault) {
		return false
	}
	status, content := v.answer(request, call, body, p.files)
	if fault != nil && !v.after(p, *fault, status, content) {
		return false
	}
	if reply(p, status, content) != nil {
		return false
	}
	if call == "vmm.shutdown" && status < 300 {
		v.exit()
	}
	return true
}

func reply(w io.Writer, status int, content []byte) error {
	var b bytes.Buffer
	fmt.Fprintf(&b, "HTTP/1.1 %d \r\nServer: Cloud Hypervisor API\r\nConnection: keep-alive\r\nContent-Type: application/json\r\n", status)
	if status != http.StatusNoContent {
		fmt.Fprintf(&b, "Content-Length: %d\r\n", len(content))
	}
	b.WriteString("\r\n")
	b.Write(content)
	_, err := w.Write(b.Bytes())
	return err
}

// answer carries out a call.
func (v *vmm) answer(request *http.Request, call string, body []byte, files []int) (int, []byte) {
	c, known := calls[call]
	var result any
	var err error
	switch {
	case request.Method != http.MethodGet && request.Method != http.MethodPut:
		return http.StatusBadRequest, []byte(`{ "error": "Invalid HTTP Method: Unsupported HTTP method." }`)
	case !known:
		err = &refusal{http.StatusNotFound, []string{"Not Found"}}
	case request.Method != c.method || !c.body && len(body) > 0:
		err = &refusal{http.StatusBadRequest, []string{"Bad Request"}}
	case c.body && len(body) == 0:
		return http.StatusBadRequest, nil
	default:
		if err = v.described(call, body); err == nil {
			result, err = c.do(v, body, files)
		}
	}
	var refused *refusal
	switch {
	case errors.As(err, &refused):
		content, merr := json.Marshal(refused.causes)
		if merr != nil {
			panic("causes are plain data: " + merr.Error())
		}
		return refused.status, content
	case err != nil:
		return http.StatusBadRequest, fmt.Appendf(nil, `["Failed to deserialize JSON",%q]`, err)
	case result == nil && call == "vmm.shutdown":
		return http.StatusOK, nil
	case result == nil:
		return http.StatusNoContent, nil
	}
	content, err := json.Marshal(result)
	if err != nil {
		return http.StatusInternalServerError, nil
	}
	return http.StatusOK, content
}

// fault is what is to go wrong with a call, if anything.
func (v *vmm) fault(call string) *Fault {
	i := slices.IndexFunc(v.options.Faults, func(f Fault) bool { return f.Call == call || f.Call == "" })
	if i < 0 {
		return nil
	}
	return &v.options.Faults[i]
}

// before does what goes wrong instead of a call. It returns whether the call is carried out.
func (v *vmm) before(p *peer, f Fault) bool {
	switch f.Kind {
	case Slow:
		time.Sleep(time.Duration(f.Milliseconds) * time.Millisecond)
	case Refuse:
		content, err := json.Marshal(f.Causes)
		if err != nil {
			panic("causes are plain data: " + err.Error())
		}
		_ = reply(p, f.Status, content)
		return false
	case Crash:
		_ = unix.Kill(os.Getpid(), unix.SIGSEGV)
		os.Exit(139) // the first process of a pid namespace does not die of signals of its own
	case Hang:
		select {}
	case Garbage:
		_, _ = io.WriteString(p, "\x00\x01 what? \r\n\r\n")
		return false
	case Gap:
		_, _ = v.events.Write([]byte("{\n  \"timestamp\": {\n  {"))
	case Exit:
		fmt.Fprintln(os.Stderr, "cloud-hypervisor: 1.0s: <vcpu0> ERROR:vmm/src/cpu.rs:1 -- VCPU generated error")
		v.emit("vm", "shutdown")
		os.Exit(0)
	}
	return true
}

// after does what goes wrong after a call. It returns whether the answer is sent.
func (v *vmm) after(p *peer, f Fault, status int, content []byte) bool {
	if f.Kind != Half {
		return true
	}
	var b bytes.Buffer
	_ = reply(&b, status, content)
	_, _ = p.Write(b.Bytes()[:b.Len()/2])
	return false
}
