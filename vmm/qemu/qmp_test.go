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
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/ephemeral-run/ephemeral/vmm"
	"github.com/ephemeral-run/ephemeral/vmm/hypervisor"
)

const greeting = `{"QMP": {"version": {"qemu": {"micro": 0, "minor": 0, "major": 10}}, "capabilities": ["oob"]}}` + "\r\n"

// fakeQEMU answers the commands of one monitor.
type fakeQEMU struct {
	t      *testing.T
	conn   *net.UnixConn
	lines  *bufio.Scanner
	events []event // as the client saw them
	client *monitor
}

// request is one command as QEMU sees it.
type request struct {
	Execute   string         `json:"execute"`
	Arguments map[string]any `json:"arguments"`
	ID        uint64         `json:"id"`
}

func newFakeQEMU(t *testing.T) *fakeQEMU {
	t.Helper()
	t.Cleanup(func() { goleak.VerifyNone(t) })
	host, guest, err := socketPair("test")
	if err != nil {
		t.Fatal(err)
	}
	other, err := net.FileConn(guest)
	_ = guest.Close()
	if err != nil {
		t.Fatal(err)
	}
	f := &fakeQEMU{t: t, conn: other.(*net.UnixConn), lines: bufio.NewScanner(other)}
	f.client = newMonitor(host, func(e event) { f.events = append(f.events, e) })
	t.Cleanup(func() {
		_ = f.conn.Close()
		f.client.close()
	})
	return f
}

func (f *fakeQEMU) say(text string) {
	f.t.Helper()
	if _, err := io.WriteString(f.conn, text); err != nil {
		f.t.Error(err)
	}
}

func (f *fakeQEMU) hear() (got request) {
	if !f.lines.Scan() {
		f.t.Errorf("no command: %v", f.lines.Err())
		return got
	}
	if err := json.Unmarshal(f.lines.Bytes(), &got); err != nil {
		f.t.Errorf("command %q: %v", f.lines.Text(), err)
	}
	return got
}

// serve greets, takes the handshake and answers further commands with what reply returns, on its own goroutine.
func (f *fakeQEMU) serve(commands int, reply func(request) string) (wait func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		f.say(greeting)
		for range commands {
			got := f.hear()
			if got.Execute == "qmp_capabilities" {
				f.say(fmt.Sprintf(`{"return": {}, "id": %d}`+"\r\n", got.ID))
				continue
			}
			f.say(reply(got))
		}
	}()
	return func() { <-done }
}

func shortly(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func TestMonitor(t *testing.T) {
	f := newFakeQEMU(t)
	wait := f.serve(4, func(r request) string {
		switch r.Execute {
		case "query-status":
			return fmt.Sprintf(`{"event": "STOP", "timestamp": {}}`+"\r\n"+`{"return": {"status": "paused"}, "id": %d}`+"\r\n", r.ID)
		case "getfd":
			return fmt.Sprintf(`{"id": %d, "error": {"class": "GenericError", "desc": "No file descriptor"}}`+"\r\n", r.ID)
		}
		return fmt.Sprintf(`{"return": {}, "id": %d}`+"\r\n", r.ID)
	})
	ctx := shortly(t)
	if err := f.client.handshake(ctx); err != nil {
		t.Fatal(err)
	}
	var status struct{ Status string }
	if err := f.client.query(ctx, &status, "query-status", nil); err != nil || status.Status != "paused" {
		t.Errorf("status %+v, %v", status, err)
	}
	var refused *commandError
	if err := f.client.execute(ctx, "getfd", map[string]any{"fdname": "x"}); !errors.As(err, &refused) || refused.desc != "No file descriptor" {
		t.Errorf("refused command: %v", err)
	}
	if err := f.client.execute(ctx, "cont", nil); err != nil {
		t.Errorf("after a refused command: %v", err)
	}
	wait()
	_ = f.conn.Close()
	<-f.client.done
	if len(f.events) != 1 || f.events[0].name != "STOP" {
		t.Errorf("events %v", f.events)
	}
	if err := f.client.execute(ctx, "cont", nil); err == nil {
		t.Error("a command on an ended monitor succeeds")
	}
}

func TestMonitorPassesDescriptors(t *testing.T) {
	f := newFakeQEMU(t)
	read, write, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = read.Close() }()
	received := make(chan int, 1)
	go func() {
		text, rights := make([]byte, 4096), make([]byte, unix.CmsgSpace(4))
		n, oob, _, _, err := f.conn.ReadMsgUnix(text, rights)
		if err != nil {
			t.Error(err)
		}
		var got request
		if err := json.Unmarshal(bytes.TrimSpace(text[:n]), &got); err != nil || got.Execute != "getfd" {
			t.Errorf("command %q: %v", text[:n], err)
		}
		messages, err := unix.ParseSocketControlMessage(rights[:oob])
		if err != nil || len(messages) != 1 {
			t.Errorf("%d control messages, %v", len(messages), err)
			close(received)
			return
		}
		fds, err := unix.ParseUnixRights(&messages[0])
		if err != nil || len(fds) != 1 {
			t.Errorf("descriptors %v, %v", fds, err)
		}
		f.say(fmt.Sprintf(`{"return": {}, "id": %d}`+"\r\n", got.ID))
		received <- fds[0]
	}()
	if err := f.client.execute(shortly(t), "getfd", map[string]any{"fdname": "x"}, write); err != nil {
		t.Fatal(err)
	}
	_ = write.Close()
	passed := os.NewFile(uintptr(<-received), "passed")
	if _, err := io.WriteString(passed, "hello"); err != nil {
		t.Error(err)
	}
	_ = passed.Close()
	if got, err := io.ReadAll(read); err != nil || string(got) != "hello" {
		t.Errorf("through the passed descriptor came %q, %v", got, err)
	}
}

func TestMonitorGivesUp(t *testing.T) {
	for name, c := range map[string]struct {
		say  string
		want error
	}{
		"no greeting":             {"", nil},
		"closed":                  {"", nil},
		"garbage":                 {"hello\r\n", errMonitor},
		"half a message":          {`{"QMP": {`, nil},
		"array":                   {"[]\r\n", errMonitor},
		"null":                    {"null\r\n", errMonitor},
		"answer without id":       {greeting + `{"return": {}}` + "\r\n", errMonitor},
		"neither":                 {greeting + `{"id": 1}` + "\r\n", errMonitor},
		"negative id":             {greeting + `{"id": -1, "return": {}}` + "\r\n", errMonitor},
		"a second greeting":       {greeting + greeting, errMonitor},
		"endless line":            {`{"QMP": "` + strings.Repeat("x", maxMessage) + `"}` + "\r\n", errMonitor},
		"answer to nobody":        {greeting + `{"id": 99, "return": {}}` + "\r\n", nil},
		"event with strange data": {greeting + `{"event": "SHUTDOWN", "data": 7}` + "\r\n", nil},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFakeQEMU(t)
			go func() {
				_, _ = io.WriteString(f.conn, c.say)
				if name != "no greeting" {
					_ = f.conn.CloseWrite()
				}
			}()
			ctx, cancel := context.WithTimeout(context.Background(), 200*time.Millisecond)
			defer cancel()
			err := f.client.handshake(ctx)
			if err == nil {
				err = f.client.execute(ctx, "cont", nil)
			}
			if err == nil {
				t.Fatal("a broken monitor serves")
			}
			if c.want != nil && !errors.Is(err, c.want) && !errors.Is(f.client.lost(), c.want) {
				t.Errorf("%v, want %v", err, c.want)
			}
			if name == "no greeting" && !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("%v, want the end of the context", err)
			}
		})
	}
}

func FuzzMonitor(f *testing.F) {
	f.Add([]byte(greeting + `{"return": {}, "id": 1}` + "\r\n"))
	f.Add([]byte(greeting + `{"event": "SHUTDOWN", "data": {"guest": true, "reason": "guest-reset"}}` + "\r\n"))
	f.Add([]byte(greeting + `{"event": "MIGRATION", "data": {"status": "completed"}}` + "\r\n"))
	f.Add([]byte(`{"id":1,"error":{"class":"x","desc":null}}` + "\n"))
	f.Fuzz(func(t *testing.T, input []byte) {
		ma := &machine{Machine: hypervisor.New("QEMU", vmm.Spec{}), loaded: make(chan error, 1)}
		m := &monitor{onEvent: ma.onEvent, ready: make(chan struct{}), pending: make(map[uint64]chan message)}
		waiter := make(chan message, 1)
		m.pending[1] = waiter
		if err := m.readAll(bytes.NewReader(input)); err == nil {
			t.Error("no error at the end of the input")
		}
		select {
		case got := <-waiter:
			if got.Return == nil && got.Error == nil {
				t.Error("an answer that is none")
			}
		default:
		}
	})
}
