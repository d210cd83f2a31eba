package chfake

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ephemeral-run/ephemeral/guestagent/exec"
	"github.com/ephemeral-run/ephemeral/guestagent/proto"
	"github.com/ephemeral-run/ephemeral/guestagent/server"
)

// Control is a file of the guest into which a command writes how the guest ends: "reboot" or "panic".
const Control = "/run/chfake-control"

// firstPort is the first that the host gets for a connection.
const firstPort = 1 << 30

// guests is what all guests of a process have in common.
type guests struct {
	reaper *exec.Reaper
	runner *exec.Runner
}

func (v *vmm) openGuests() error {
	parent := filepath.Join(v.options.Cgroup, strconv.FormatInt(time.Now().UnixNano(), 36))
	if err := os.Mkdir(parent, 0o755); err != nil {
		return err
	}
	reaper := exec.NewReaper()
	runner, err := exec.New(exec.Config{Cgroup: parent + "/commands"}, reaper)
	if err != nil {
		return err
	}
	v.guests = &guests{reaper, runner}
	return nil
}

// guest is an agent behind a vsock socket.
type guest struct {
	vmm    *vmm
	path   string // of the socket
	socket *net.UnixListener
	agent  *queue
	ctx    context.Context
	end    context.CancelFunc

	mu      sync.Mutex
	running chan struct{} // closed while the guest runs
	port    int
	conns   map[net.Conn]struct{}
}

// newGuest makes a guest that does not run yet, with the files that its memory holds.
func (v *vmm) newGuest(memory []byte) (*guest, error) {
	vsock, _ := v.config["vsock"].(object)
	path, _ := vsock["socket"].(string)
	if err := restoreFiles(memory); err != nil {
		return nil, err
	}
	socket, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, err
	}
	g := &guest{vmm: v, path: path, socket: socket, agent: newQueue(), running: make(chan struct{}), port: firstPort, conns: map[net.Conn]struct{}{}}
	g.ctx, g.end = context.WithCancel(context.Background())
	agent := server.New(server.Config{
		Version: "chfake", Runner: v.guests.runner, System: system{}, TempDir: "/tmp", Dial: g.dialHost, Log: slog.New(slog.DiscardHandler),
		PowerOff: func() error { go v.exit(); return nil },
		Accounts: map[string]server.Account{
			"root":   {Name: "root", Home: "/root"},
			"worker": {Name: "worker", Home: "/tmp", User: exec.User{UID: 65534, GID: 65534, Groups: []uint32{65534}}},
		},
	})
	go func() {
		_ = agent.Serve(g.ctx, g.agent)
		_ = agent.Close()
	}()
	go g.accept()
	go g.control()
	return g, nil
}

// system lets everything be done to it.
type system struct{}

func (system) SetClock(time.Time) error        { return nil }
func (system) StepClock(time.Duration) error   { return nil }
func (system) Reseed([]byte) error             { return nil }
func (system) SetNames(string, string) error   { return nil }
func (system) SetNetwork(string, string) error { return nil }

// control ends the guest as its commands ask for.
func (g *guest) control() {
	_ = os.Remove(Control)
	for g.ctx.Err() == nil {
		b, err := os.ReadFile(Control)
		switch {
		case err == nil && strings.Contains(string(b), "panic"):
			g.vmm.emit("guest", "panic")
			fallthrough
		case err == nil && strings.Contains(string(b), "reboot"):
			g.vmm.emit("vm", "rebooting")
			g.vmm.emit("vm", "rebooted")
			return
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// pause stops whatever goes over the socket. Commands of the guest go on, which nobody sees.
func (g *guest) pause() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.running = make(chan struct{})
}

func (g *guest) resume() {
	g.mu.Lock()
	defer g.mu.Unlock()
	close(g.running)
}

// wait returns when the guest runs, or has ended.
func (g *guest) wait() error {
	g.mu.Lock()
	running := g.running
	g.mu.Unlock()
	select {
	case <-running:
		return nil
	case <-g.ctx.Done():
		return net.ErrClosed
	}
}

func (g *guest) close() {
	g.end()
	_ = g.socket.Close()
	_ = g.agent.Close()
	g.mu.Lock()
	defer g.mu.Unlock()
	for c := range g.conns {
		_ = c.Close()
	}
}

// accept serves the host's connections.
func (g *guest) accept() {
	for {
		c, err := g.socket.Accept()
		if err != nil {
			return
		}
		go func() {
			if err := g.connect(c); err != nil {
				_ = c.Close()
			}
		}()
	}
}

// connect answers a CONNECT. Refused ones just end.
func (g *guest) connect(c net.Conn) error {
	reader := bufio.NewReaderSize(c, 64)
	line, err := reader.ReadSlice('\n')
	if err != nil || len(line) > 32 {
		return errors.New("no CONNECT")
	}
	word, number, _ := strings.Cut(strings.TrimSpace(string(line)), " ")
	port, err := strconv.ParseUint(number, 10, 32)
	if err != nil || !strings.EqualFold(word, "connect") {
		return errors.New("no CONNECT")
	}
	if err := g.wait(); err != nil {
		return err
	}
	if port != uint64(proto.AgentPort) {
		return errors.New("nobody listens")
	}
	ours, theirs := net.Pipe()
	if !g.agent.push(theirs) {
		return errors.New("nobody listens")
	}
	g.mu.Lock()
	g.port++
	host := g.port
	g.mu.Unlock()
	if _, err := fmt.Fprintf(c, "OK %d\n", host); err != nil {
		_ = ours.Close()
		return err
	}
	g.relay(c, reader, ours)
	return nil
}

// dialHost connects the guest to a port of the host.
func (g *guest) dialHost(ctx context.Context, port uint32) (net.Conn, error) {
	var d net.Dialer
	c, err := d.DialContext(ctx, "unix", fmt.Sprintf("%s_%d", g.path, port))
	if err != nil {
		return nil, unix.ECONNRESET
	}
	ours, theirs := net.Pipe()
	go g.relay(c, c, ours)
	return theirs, nil
}

// relay carries bytes both ways while the guest runs, until either side ends.
func (g *guest) relay(c net.Conn, from io.Reader, inside net.Conn) {
	g.mu.Lock()
	g.conns[c] = struct{}{}
	g.mu.Unlock()
	done := make(chan struct{}, 2)
	go func() { g.copy(inside, from); done <- struct{}{} }()
	go func() { g.copy(c, inside); done <- struct{}{} }()
	<-done
	_ = c.Close()
	_ = inside.Close()
	<-done
	g.mu.Lock()
	delete(g.conns, c)
	g.mu.Unlock()
}

func (g *guest) copy(to io.Writer, from io.Reader) {
	buffer := make([]byte, 64<<10)
	for {
		n, err := from.Read(buffer)
		if n > 0 {
			if g.wait() != nil {
				return
			}
			if _, werr := to.Write(buffer[:n]); werr != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}

// memory is what a guest's memory holds: the files in its /run.
func (g *guest) memory() ([]byte, error) {
	files := map[string][]byte{}
	entries, err := os.ReadDir("/run")
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		path := filepath.Join("/run", e.Name())
		if !e.Type().IsRegular() || path == Control {
			continue
		}
		if files[path], err = os.ReadFile(path); err != nil {
			return nil, err
		}
	}
	return json.Marshal(files)
}

// restoreFiles writes what memory holds.
func restoreFiles(memory []byte) error {
	if len(memory) == 0 {
		return nil
	}
	text, _, _ := bytes.Cut(memory, []byte{0})
	var files map[string][]byte
	if err := json.Unmarshal(text, &files); err != nil {
		return fmt.Errorf("the memory is no guest's: %w", err)
	}
	for path, content := range files {
		if err := os.WriteFile(path, content, 0o644); err != nil {
			return err
		}
	}
	return nil
}

// queue is a listener of connections that are pushed into it.
type queue struct {
	conns chan net.Conn
	done  chan struct{}
	once  sync.Once
}

func newQueue() *queue { return &queue{conns: make(chan net.Conn, 64), done: make(chan struct{})} }

func (q *queue) push(c net.Conn) bool {
	select {
	case q.conns <- c:
		return true
	case <-q.done:
		return false
	}
}

// Accept returns the next connection.
func (q *queue) Accept() (net.Conn, error) {
	select {
	case c := <-q.conns:
		return c, nil
	case <-q.done:
		return nil, net.ErrClosed
	}
}

// Close ends Accept.
func (q *queue) Close() error {
	q.once.Do(func() { close(q.done) })
	return nil
}

// Addr is none.
func (q *queue) Addr() net.Addr { return &net.UnixAddr{Name: "guest", Net: "unix"} }
