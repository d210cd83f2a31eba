package guest

import (
	"bytes"
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
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/ephemeral-run/ephemeral/guestagent/exec"
	"github.com/ephemeral-run/ephemeral/guestagent/proto"
	"github.com/ephemeral-run/ephemeral/guestagent/proto/mux"
	"github.com/ephemeral-run/ephemeral/guestagent/server"
)

var testReaper *exec.Reaper

func TestMain(m *testing.M) {
	if err := errors.Join(unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), unix.CloseRange(3, 1<<20, unix.CLOSE_RANGE_CLOEXEC)); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	testReaper = exec.NewReaper()
	code := m.Run()
	testReaper.Close()
	if err := goleak.Find(); err != nil && code == 0 {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

// fakeSystem is a kernel that lets everything be done to it.
type fakeSystem struct {
	mu     sync.Mutex
	step   time.Duration
	clock  time.Time
	reseed error
	names  [2]string
}

func (f *fakeSystem) SetClock(to time.Time) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.names == [2]string{} {
		return errors.New("of Prepare a step was measured")
	}
	f.clock = to
	return nil
}
func (f *fakeSystem) StepClock(by time.Duration) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.step = by
	return nil
}
func (f *fakeSystem) Reseed([]byte) error { return f.reseed }
func (f *fakeSystem) SetNames(hostname, id string) error {
	f.names = [2]string{hostname, id}
	return nil
}
func (*fakeSystem) SetNetwork(mac, address string) error { return nil }

// pair is the two ends of a serial line with a session on it.
func pair(t testing.TB) (host, guest *mux.Session) {
	t.Helper()
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC|syscall.SOCK_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	h, g := os.NewFile(uintptr(fds[0]), "host"), os.NewFile(uintptr(fds[1]), "guest")
	up := make(chan error, 1)
	go func() {
		var err error
		guest, err = mux.Guest(g, proto.AgentPort)
		up <- err
	}()
	host, err = mux.Host(ctx(t), h)
	if err := errors.Join(err, <-up); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = host.Close(); _ = guest.Close() })
	return host, guest
}

func ctx(t testing.TB) context.Context {
	c, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	t.Cleanup(cancel)
	return c
}

// ctxWith ends after d with a cause.
func ctxWith(t testing.TB, d time.Duration, cause error) context.Context {
	c, cancel := context.WithTimeoutCause(context.Background(), d, cause)
	t.Cleanup(cancel)
	return c
}

// machine is a real agent in this process, reached as over a serial line.
type machine struct {
	*Client
	host, guest *mux.Session
	system      *fakeSystem
	powerOff    chan struct{}
}

func newMachine(t testing.TB) *machine {
	t.Helper()
	parent := filepath.Join(hierarchy(t), fmt.Sprintf("ephemeral-test-%d-%d", os.Getpid(), time.Now().UnixNano()))
	if err := os.Mkdir(parent, 0o755); err != nil {
		t.Fatal(err)
	}
	runner, err := exec.New(exec.Config{Cgroup: parent + "/commands"}, testReaper)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_, err := runner.KillAll() // a command whose call has ended may be dying still
		if err := errors.Join(err, runner.Close(), os.Remove(parent)); err != nil {
			t.Error(err)
		}
	})
	m := &machine{system: &fakeSystem{}, powerOff: make(chan struct{}, 1)}
	m.host, m.guest = pair(t)
	agent := server.New(server.Config{
		Version: "test", Runner: runner, System: m.system, TempDir: "/tmp", Dial: m.guest.Dial, Log: slog.New(slog.DiscardHandler),
		PowerOff: func() error { m.powerOff <- struct{}{}; return nil },
		Accounts: map[string]server.Account{
			"root":   {Name: "root", Home: "/root"},
			"worker": {Name: "worker", Home: "/tmp", User: exec.User{UID: 65534, GID: 65534, Groups: []uint32{65534}}},
		},
	})
	serve(t, m.guest, agent.Serve)
	t.Cleanup(func() { _ = agent.Close() })
	m.Client = Connect(m.host.Dial)
	return m
}

// serve runs an agent until the end of the test.
func serve(t testing.TB, guest *mux.Session, run func(context.Context, net.Listener) error) {
	t.Helper()
	listener, err := guest.Listen(proto.AgentPort)
	if err != nil {
		t.Fatal(err)
	}
	serving, stop := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() { defer close(ended); _ = run(serving, listener) }()
	t.Cleanup(func() { stop(); <-ended })
}

func hierarchy(t testing.TB) string {
	for _, dir := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/unified"} {
		if _, err := os.Stat(dir + "/cgroup.controllers"); err == nil {
			return dir
		}
	}
	t.Fatal("no version 2 cgroup hierarchy is mounted")
	return ""
}

var identity = Identity{Hostname: "m-0123456789ab", MachineID: "0123456789abcdef0123456789abcdef", MAC: "02:00:00:00:00:01", Address: "10.0.0.2/24"}

// prepared is a machine ready for work.
func prepared(t testing.TB) (*machine, string) {
	t.Helper()
	m := newMachine(t)
	p, err := m.Prepare(ctx(t), identity)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(filepath.Dir(p.Scratch)) })
	return m, p.Scratch
}

func TestNothingBeforePrepare(t *testing.T) {
	m := newMachine(t)
	if err := m.Ping(ctx(t)); err != nil {
		t.Fatal(err)
	}
	if exit, err := m.Exec(ctx(t), Command{Args: []string{"true"}, Warming: true}, nil, nil); err != nil || exit.Code != 0 || exit.Outcome != "exited" {
		t.Errorf("warming: %+v, %v", exit, err)
	}
	for name, call := range map[string]func() error{
		"exec": func() error { _, err := m.Exec(ctx(t), Command{Args: []string{"true"}}, nil, nil); return err },
		"worker": func() error {
			_, err := m.StartWorker(ctx(t), Worker{Prompt: "p", Model: "m"}, nil)
			return err
		},
		"put": func() error { return m.PutFile(ctx(t), "a", 0, strings.NewReader("x")) },
		"get": func() error { return m.GetFile(ctx(t), "a", 10, io.Discard) },
	} {
		var refused *RefusedError
		if err := call(); !errors.As(err, &refused) || refused.Detail != "not prepared" {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestPrepareOnce(t *testing.T) {
	m, scratch := prepared(t)
	if m.system.names != [2]string{identity.Hostname, identity.MachineID} {
		t.Errorf("names: %v", m.system.names)
	}
	if m.system.step == 0 || m.system.step.Abs() > time.Second { // one process, one clock
		t.Errorf("clock stepped by %v", m.system.step)
	}
	info, err := os.Stat(scratch)
	if err != nil || info.Sys().(*syscall.Stat_t).Uid != 65534 {
		t.Errorf("scratch: %+v, %v", info, err)
	}
	if _, err := m.Prepare(ctx(t), identity); !errors.Is(err, ErrNotPrepared) {
		t.Errorf("second prepare: %v", err)
	}
}

func TestSetClock(t *testing.T) {
	m := newMachine(t)
	if err := m.SetClock(ctx(t)); !errors.Is(err, ErrNotPrepared) {
		t.Errorf("of an unprepared machine: %v", err)
	}
	m, _ = prepared(t)
	clock, err := m.Clock(ctx(t))
	if err != nil {
		t.Fatal(err)
	}
	if clock.Right() {
		t.Error("right before it was set")
	}
	for range 2 { // over one connection
		before := time.Now()
		if err := clock.Set(ctx(t)); err != nil || !clock.Right() {
			t.Errorf("right %v, %v", clock.Right(), err)
		}
		if set := m.system.clock; set.Before(before) || set.After(time.Now()) {
			t.Errorf("set to %v", set)
		}
	}
	if err := clock.Close(); err != nil {
		t.Error(err)
	}
	if err := clock.Set(ctx(t)); !errors.Is(err, ErrLost) || clock.Right() {
		t.Errorf("closed: right %v, %v", clock.Right(), err)
	}
}

// A clock that nobody sets is taken for right as long as neither drift nor what moves the host's can have made it wrong.
func TestClockStaysRight(t *testing.T) {
	set := time.Now()
	for name, c := range map[string]struct {
		off  time.Duration
		now  time.Time
		want bool
	}{
		"at once":             {2 * time.Millisecond, set, true},
		"for a minute":        {2 * time.Millisecond, set.Add(time.Minute), true},
		"for two minutes":     {2 * time.Millisecond, set.Add(2 * time.Minute), false},
		"for a minute, worse": {30 * time.Millisecond, set.Add(time.Minute), false},
	} {
		clock := Clock{set: set, off: c.off}
		if got := clock.offBy(c.now) <= MaxClockError; got != c.want {
			t.Errorf("%s: right %v, off by %v", name, got, clock.offBy(c.now))
		}
	}
}

func TestPrepareFailsClosed(t *testing.T) {
	m := newMachine(t)
	m.system.reseed = errors.New("ENODATA")
	if _, err := m.Prepare(ctx(t), identity); !errors.Is(err, ErrNotPrepared) {
		t.Errorf("got %v", err)
	}
	if _, err := m.Exec(ctx(t), Command{Args: []string{"true"}}, nil, nil); err == nil {
		t.Error("the agent works without a reseed")
	}
	for name, bad := range map[string]Identity{
		"hostname":   {Hostname: "a b", MachineID: identity.MachineID},
		"machine id": {Hostname: "a", MachineID: "xyz"},
		"mac":        {Hostname: "a", MachineID: identity.MachineID, MAC: "01:00:5e:00:00:01"},
		"address":    {Hostname: "a", MachineID: identity.MachineID, Address: "10.0.0.1"},
	} {
		if _, err := newMachine(t).Prepare(ctx(t), bad); !errors.Is(err, ErrNotPrepared) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestExecExactBytes(t *testing.T) {
	m, scratch := prepared(t)
	var stdout, stderr bytes.Buffer
	exit, err := m.Exec(ctx(t), Command{
		Args: []string{"sh", "-c", `pwd; printf '%s|' "$HOME" "$USER" "$LANG" "$X" "$E"; printf '\303' >&2; exit 7`},
		Env:  []string{"X=1", "X=zwei €", "novalue", "=v", "E="},
	}, &stdout, &stderr)
	if err != nil {
		t.Fatal(err)
	}
	if want := scratch + "\n/tmp|worker|C.UTF-8|zwei €||"; stdout.String() != want {
		t.Errorf("got %q, want %q", stdout.String(), want)
	}
	if stderr.String() != "\xc3" || exit.Code != 7 || exit.Outcome != "exited" || exit.StderrBytes != 1 {
		t.Errorf("got %q, %+v", stderr.String(), exit)
	}
}

func TestExecTenMegabytes(t *testing.T) {
	m, _ := prepared(t)
	var want bytes.Buffer // NULs, and characters that the chunks split
	for i := range 1_000_000 {
		fmt.Fprintf(&want, "€\x00\xff%05d", i%100_000)
	}
	var stdout bytes.Buffer
	exit, err := m.Exec(ctx(t), Command{Args: []string{"cat"}, Stdin: bytes.NewReader(want.Bytes())}, &stdout, nil)
	if err != nil || exit.Code != 0 || !bytes.Equal(stdout.Bytes(), want.Bytes()) {
		t.Errorf("%d bytes of %d, %+v, %v", stdout.Len(), want.Len(), exit, err)
	}
}

func TestExecOutputLimit(t *testing.T) {
	m, _ := prepared(t)
	var stdout, stderr bytes.Buffer
	exit, err := m.Exec(ctx(t), Command{Args: []string{"sh", "-c", "head -c 5000000 /dev/zero; echo fine >&2"}, OutputLimit: 100_000}, &stdout, &stderr)
	if err != nil || stdout.Len() != 100_000 || !exit.StdoutTruncated || exit.StdoutBytes != 5_000_000 || exit.StderrTruncated || stderr.String() != "fine\n" {
		t.Errorf("%d bytes, %q, %+v, %v", stdout.Len(), stderr.String(), exit, err)
	}
}

func TestExecEnds(t *testing.T) {
	m, _ := prepared(t)
	t.Run("timeout", func(t *testing.T) {
		exit, err := m.Exec(ctx(t), Command{Args: []string{"sh", "-c", "sleep 1000 & setsid sleep 1000"}, Timeout: 100 * time.Millisecond}, nil, nil)
		if err != nil || exit.Outcome != "timed_out" {
			t.Errorf("got %+v, %v", exit, err)
		}
	})
	t.Run("stdin never ends", func(t *testing.T) {
		r, w := io.Pipe()
		defer w.Close()
		exit, err := m.Exec(ctx(t), Command{Args: []string{"true"}, Stdin: r}, nil, nil)
		if err != nil || exit.Outcome != "exited" || exit.Code != 0 {
			t.Errorf("got %+v, %v", exit, err)
		}
	})
	t.Run("stdin fails", func(t *testing.T) {
		failure := errors.New("disk on fire")
		_, err := m.Exec(ctx(t), Command{Args: []string{"cat"}, Stdin: io.MultiReader(strings.NewReader("x"), failingReader{failure})}, nil, nil)
		if !errors.Is(err, failure) {
			t.Errorf("got %v", err)
		}
	})
	t.Run("stdin unread", func(t *testing.T) {
		exit, err := m.Exec(ctx(t), Command{Args: []string{"head", "-c", "10"}, Stdin: bytes.NewReader(make([]byte, 5<<20))}, nil, nil)
		if err != nil || exit.Outcome != "exited" || exit.Code != 0 {
			t.Errorf("got %+v, %v", exit, err)
		}
	})
	t.Run("writer fails", func(t *testing.T) {
		failure := errors.New("no space")
		_, err := m.Exec(ctx(t), Command{Args: []string{"yes"}}, failingWriter{failure}, nil)
		if !errors.Is(err, failure) {
			t.Errorf("got %v", err)
		}
	})
	t.Run("context", func(t *testing.T) {
		cause := errors.New("cancelled by its owner")
		c, cancel := context.WithCancelCause(context.Background())
		time.AfterFunc(100*time.Millisecond, func() { cancel(cause) })
		_, err := m.Exec(c, Command{Args: []string{"sleep", "1000"}}, nil, nil)
		if !errors.Is(err, cause) || errors.Is(err, ErrLost) {
			t.Errorf("got %v", err)
		}
		if err := m.Kill(ctx(t)); err != nil { // nothing is left: what the end of the call killed may still be going
			t.Error(err)
		}
	})
	t.Run("kill", func(t *testing.T) {
		done := make(chan Exit, 1)
		go func() {
			exit, err := m.Exec(ctx(t), Command{Args: []string{"sh", "-c", "echo on; setsid sleep 1000 & sleep 1000"}}, nil, nil)
			if err != nil {
				t.Error(err)
			}
			done <- exit
		}()
		time.Sleep(200 * time.Millisecond)
		if err := m.Kill(ctx(t)); err != nil {
			t.Error(err)
		}
		if exit := <-done; exit.Outcome != "killed" {
			t.Errorf("got %+v", exit)
		}
	})
	t.Run("not found", func(t *testing.T) {
		exit, err := m.Exec(ctx(t), Command{Args: []string{"no-such-thing"}}, nil, nil)
		if err != nil || exit.Outcome != "not_found" || exit.Code != 127 || exit.Detail == "" {
			t.Errorf("got %+v, %v", exit, err)
		}
	})
	t.Run("bad user", func(t *testing.T) {
		var refused *RefusedError
		if _, err := m.Exec(ctx(t), Command{Args: []string{"id"}, User: "daemon"}, nil, nil); !errors.As(err, &refused) {
			t.Errorf("got %v", err)
		}
	})
	t.Run("not UTF-8", func(t *testing.T) {
		if _, err := m.Exec(ctx(t), Command{Args: []string{"\xff"}}, nil, nil); err == nil || errors.Is(err, ErrLost) {
			t.Errorf("got %v", err)
		}
	})
}

type failingReader struct{ err error }

func (f failingReader) Read([]byte) (int, error) { return 0, f.err }

type failingWriter struct{ err error }

func (f failingWriter) Write([]byte) (int, error) { return 0, f.err }

func TestSlowReaderStallsNobodyElse(t *testing.T) {
	m, _ := prepared(t)
	c, cancel := context.WithCancel(ctx(t))
	ended, blocked := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		_, _ = m.Exec(c, Command{Args: []string{"yes"}}, writerFunc(func(p []byte) (int, error) {
			select {
			case <-blocked:
			default:
				close(blocked)
			}
			<-c.Done()
			return len(p), nil
		}), nil)
	}()
	<-blocked
	time.Sleep(1500 * time.Millisecond) // ttrpc gives a stream up whose reader is a second late
	start := time.Now()
	if exit, err := m.Exec(ctx(t), Command{Args: []string{"true"}}, nil, nil); err != nil || exit.Code != 0 {
		t.Errorf("got %+v, %v", exit, err)
	}
	if took := time.Since(start); took > 2*time.Second {
		t.Errorf("took %v", took)
	}
	cancel()
	<-ended
}

func TestSlowReaderGetsEverything(t *testing.T) {
	m, _ := prepared(t)
	total := 0
	exit, err := m.Exec(ctx(t), Command{Args: []string{"head", "-c", "1500000", "/dev/zero"}}, writerFunc(func(p []byte) (int, error) {
		if total == 0 {
			time.Sleep(2 * time.Second)
		}
		total += len(p)
		return len(p), nil
	}), nil)
	if err != nil || exit.Code != 0 || total != 1_500_000 {
		t.Errorf("%d bytes, %+v, %v", total, exit, err)
	}
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

func TestBrokenStreamIsLost(t *testing.T) {
	m, _ := prepared(t)
	time.AfterFunc(300*time.Millisecond, func() { _ = m.guest.Close() })
	exit, err := m.Exec(ctx(t), Command{Args: []string{"sh", "-c", "echo on; sleep 1000"}}, nil, nil)
	if !errors.Is(err, ErrLost) || !strings.Contains(err.Error(), "line ended: EOF") || exit.Outcome != "" {
		t.Errorf("got %+v, %v, want it lost, and why", exit, err)
	}
	if _, err := m.Exec(ctx(t), Command{Args: []string{"true"}}, nil, nil); !errors.Is(err, ErrLost) {
		t.Errorf("dial of a dead machine: %v", err)
	}
}

func TestShutdown(t *testing.T) {
	m := newMachine(t)
	if err := m.Shutdown(ctx(t)); err != nil {
		t.Fatal(err)
	}
	<-m.powerOff
}
