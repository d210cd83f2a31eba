// Package redisserver runs a private redis-server as a child process: reachable through a unix socket only, with
// append-only persistence in a directory of its own, restarted when it dies, and gone when this process is gone.
package redisserver

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"
)

// ErrMissing says that no redis-server is installed; the message names the fix.
var ErrMissing = errors.New("redis-server is not installed: install it (Debian: apt-get install redis-server) " +
	"or set EPHEMERAL_REDIS_URL to a Redis that runs already")

// ErrInUse says that another process, or a redis-server that it left, still works in the directory.
var ErrInUse = errors.New("the Redis directory is in use by another process")

// How long things may take, and how a dying server is restarted.
const (
	closeGrace = 10 * time.Second       // from SIGTERM to SIGKILL
	minBackoff = 100 * time.Millisecond // between restarts, doubled each time
	maxBackoff = 5 * time.Second
	healthyRun = 3 * time.Second // after a server that lived this long it is minBackoff again: runs pay for compute some seconds ahead only
)

// Options are the choices a caller may make; the zero value is good.
type Options struct {
	Binary string       // path or name of redis-server; empty: looked up in PATH
	Fsync  string       // appendfsync: "always" (default: nothing acknowledged is ever lost), "everysec" or "no"
	Log    *slog.Logger // where the server's own log goes; nil: slog.Default()
}

// Server is a running redis-server child.
type Server struct {
	dir    string
	socket string
	tmp    string // directory made for the socket; empty when the socket is in dir
	binary string
	conf   string
	log    *slog.Logger
	lock   *os.File
	room   room

	pid     atomic.Int64
	starts  atomic.Int64
	cancel  context.CancelFunc
	ready   chan error    // the first start's outcome
	serving atomic.Bool   // between the first answer and Close
	done    chan struct{} // closed when the supervisor has ended
}

// Start makes dir if it is missing, starts a redis-server whose data is in it, and returns when it answers. A server
// that loads a large data set answers late: ctx bounds the wait. The server lives until Close, or until this process
// ends in whatever way. Errors: ErrMissing, ErrInUse, and whatever keeps the server from starting, with its last words.
func Start(ctx context.Context, dir string, o Options) (*Server, error) {
	binary, err := exec.LookPath(cmp.Or(o.Binary, "redis-server"))
	if err != nil {
		return nil, fmt.Errorf("%w (%v)", ErrMissing, err)
	}
	fsync := cmp.Or(o.Fsync, "always")
	switch fsync {
	case "everysec", "always", "no":
	default:
		return nil, fmt.Errorf("append-only fsync policy %q: want everysec, always or no", fsync)
	}
	dir, err = filepath.Abs(dir)
	if err != nil {
		return nil, fmt.Errorf("redis directory: %w", err)
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make redis directory: %w", err)
	}
	s := &Server{dir: dir, binary: binary, log: o.Log, ready: make(chan error, 1), done: make(chan struct{})}
	if s.log == nil {
		s.log = slog.Default()
	}
	if s.lock, err = lockDir(ctx, dir); err != nil {
		return nil, err
	}
	if err := s.placeSocket(); err != nil {
		return nil, errors.Join(err, s.lock.Close())
	}
	if err := publish(dir, s.socket); err != nil {
		return nil, errors.Join(err, s.lock.Close())
	}
	s.conf = config(dir, s.socket, fsync)
	s.room = room{dir: dir, log: s.log, set: s.refuse}
	run, cancel := context.WithCancel(context.Background())
	s.cancel = cancel
	go s.supervise(run)
	select {
	case err = <-s.ready:
	case <-ctx.Done():
		err = fmt.Errorf("wait for redis-server in %s: %w", dir, context.Cause(ctx))
	}
	if err == nil {
		err = s.waitAnswer(ctx)
	}
	if err != nil {
		return nil, errors.Join(err, s.Close())
	}
	s.serving.Store(true)
	return s, nil
}

// URL is what to give to a client: unix:// and the path of the socket.
func (s *Server) URL() string { return "unix://" + s.socket }

// Addr is the path of the server's unix socket.
func (s *Server) Addr() string { return s.socket }

// PID is the process id of the server as it runs now, 0 between a death and the restart.
func (s *Server) PID() int { return int(s.pid.Load()) }

// Starts counts how often the server was started: 1 unless it died.
func (s *Server) Starts() int { return int(s.starts.Load()) }

// Full is nil while the disk of the server's data has room, and an ErrDiskFull otherwise. Then nothing should be begun that adds
// data; what is under way may go on, in what was set aside for it. With half of that used up the server refuses changes.
func (s *Server) Full() error { return s.room.Full() }

// Close ends the server gracefully, so that everything it acknowledged is on the disk, and by force when it does not
// end in time. It may be called again.
func (s *Server) Close() error {
	s.serving.Store(false)
	s.cancel()
	<-s.done
	err := s.lock.Close()
	if errors.Is(err, os.ErrClosed) {
		err = nil
	}
	if s.tmp != "" {
		err = errors.Join(err, os.RemoveAll(s.tmp))
	}
	return err
}

// lockDir takes the directory's lock, waiting for a redis-server of an earlier life to be gone. The child inherits the
// open file, so the lock is free only when this process, the server and a rewrite that it forked are all dead.
func lockDir(ctx context.Context, dir string) (*os.File, error) {
	path := filepath.Join(dir, "lock")
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open lock of redis directory: %w", err)
	}
	for wait := time.Duration(0); ; wait += 50 * time.Millisecond {
		err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			return f, nil
		}
		if !errors.Is(err, syscall.EWOULDBLOCK) || wait > 10*time.Second {
			break
		}
		select {
		case <-ctx.Done():
			return nil, errors.Join(fmt.Errorf("lock %s: %w: %w", path, ErrInUse, context.Cause(ctx)), f.Close())
		case <-time.After(50 * time.Millisecond):
		}
	}
	if errors.Is(err, syscall.EWOULDBLOCK) {
		err = ErrInUse
	}
	return nil, errors.Join(fmt.Errorf("lock %s: %w", path, err), f.Close())
}

// placeSocket chooses the socket's path: in dir, or in a fresh directory under the system's temporary one when the
// path would be longer than the 107 bytes that the kernel takes.
func (s *Server) placeSocket() error {
	const longest = 107
	s.socket = filepath.Join(s.dir, "redis.sock")
	if len(s.socket) <= longest {
		if err := os.Remove(s.socket); err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("remove stale redis socket: %w", err)
		}
		return nil
	}
	tmp, err := os.MkdirTemp("", "ephemeral-redis-")
	if err != nil {
		return fmt.Errorf("make directory for the redis socket: %w", err)
	}
	s.tmp, s.socket = tmp, filepath.Join(tmp, "redis.sock")
	if len(s.socket) > longest {
		return errors.Join(fmt.Errorf("redis socket path %q is longer than %d bytes: choose a shorter TMPDIR", s.socket, longest), os.RemoveAll(tmp))
	}
	return nil
}

// config writes the server's configuration. Nothing that a client sent may end in a log of commands or a crash report:
// the slow log and the crash log are off.
func config(dir, socket, fsync string) string {
	lines := []string{
		"port 0",
		"unixsocket " + strconv.Quote(socket),
		"unixsocketperm 600",
		"dir " + strconv.Quote(dir),
		"daemonize no",
		"databases 1",
		`logfile ""`,
		"loglevel notice",
		"appendonly yes",
		"appendfsync " + fsync,
		// A rewrite takes disk and processor from those who wait for their writes; a start after a crash reads this much more.
		"auto-aof-rewrite-min-size 256mb",
		"aof-load-truncated yes", // the tail of a write cut by power loss was never acknowledged as synced
		`save ""`,
		"maxmemory-policy noeviction",
		"hash-max-listpack-value 512", // a run's record with an ordinary request in one piece: less memory, less work
		"timeout 0",
		"slowlog-log-slower-than -1",
		"crash-log-enabled no",
		"client-output-buffer-limit pubsub 256mb 64mb 60",
	}
	return strings.Join(lines, "\n") + "\n"
}

// supervise starts the server and starts it again when it dies, until ctx ends. It owns one OS thread for its whole
// life: the kernel sends PDEATHSIG when the thread that made the child ends, not the process.
func (s *Server) supervise(ctx context.Context) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	defer close(s.done)
	var wait time.Duration
	for first := true; ; first = false {
		began := time.Now()
		err := s.runOnce(ctx, first)
		if ctx.Err() != nil {
			return
		}
		if first && s.starts.Load() == 0 {
			s.ready <- err
			return
		}
		wait = backoff(wait, time.Since(began))
		if full := s.room.Full(); full != nil {
			err = fmt.Errorf("%w; %w", full, err)
		}
		s.log.Error("redis-server ended; starting it again", "dir", s.dir, "error", err, "in", wait)
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait):
		}
	}
}

// backoff is how long to wait before the next start, after a server that lived so long and was started after the last wait.
func backoff(last, lived time.Duration) time.Duration {
	if lived > healthyRun {
		return minBackoff
	}
	return min(max(2*last, minBackoff), maxBackoff)
}

// runOnce starts the server and returns when it has ended. When ctx ends it asks the server to end.
func (s *Server) runOnce(ctx context.Context, first bool) error {
	if err := removeUnfinished(s.dir); err != nil {
		return err
	}
	s.room.newLife()
	cmd := exec.CommandContext(ctx, s.binary, "-")
	cmd.Dir = s.dir
	cmd.Env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C"}
	cmd.Stdin = strings.NewReader(s.conf + replicasWanted(s.room.refusing) + "\n")
	cmd.ExtraFiles = []*os.File{s.lock}
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = closeGrace
	out, in, err := os.Pipe()
	if err != nil {
		return fmt.Errorf("make pipe for redis-server's log: %w", err)
	}
	cmd.Stdout, cmd.Stderr = in, in
	if err := cmd.Start(); err != nil {
		return errors.Join(fmt.Errorf("start %s: %w", s.binary, err), in.Close(), out.Close())
	}
	s.pid.Store(int64(cmd.Process.Pid))
	s.starts.Add(1)
	if first {
		s.ready <- nil
	}
	if err := in.Close(); err != nil {
		s.log.Warn("close log pipe of redis-server", "error", err)
	}
	last := make(chan string, 1)
	go func() { last <- s.relay(out) }()
	looking, stop := context.WithCancel(ctx)
	kept := make(chan struct{})
	go func() { defer close(kept); s.room.keep(looking) }()
	err = cmd.Wait()
	s.pid.Store(0)
	stop()
	<-kept
	words := ""
	select {
	case words = <-last:
	case <-time.After(time.Second): // a rewrite that outlives the server keeps the pipe open
	}
	if err := out.Close(); err != nil {
		s.log.Warn("close log pipe of redis-server", "error", err)
	}
	if err != nil {
		return fmt.Errorf("redis-server: %w: %s", err, words)
	}
	return errors.New("redis-server ended by itself: " + words)
}

// removeUnfinished removes the snapshots that an earlier server was killed over. No server reads them again, and they hold
// whatever was in memory then, also what must not be kept.
func removeUnfinished(dir string) error {
	for _, pattern := range []string{"temp-*", "appendonlydir/temp-*"} {
		left, err := filepath.Glob(filepath.Join(escape.Replace(dir), pattern))
		if err != nil {
			return fmt.Errorf("look for unfinished snapshots in %s: %w", dir, err)
		}
		for _, path := range left {
			if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
				return fmt.Errorf("remove an unfinished snapshot: %w", err)
			}
		}
	}
	return nil
}

// escape makes a path a pattern that matches itself alone.
var escape = strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`)

// relay copies the server's log lines to the logger until the pipe closes, and returns the last of them.
func (s *Server) relay(r io.Reader) (last string) {
	lines := bufio.NewScanner(r)
	for lines.Scan() {
		last = lines.Text()
		level := slog.LevelDebug
		if s.serving.Load() && strings.Contains(last, " # ") { // redis-server's mark of a warning, and of how it starts and ends
			level = slog.LevelWarn
		}
		s.log.Log(context.Background(), level, "redis-server", "line", last)
	}
	return last
}

// waitAnswer returns when the server answers PING, or with the reason why it never will.
func (s *Server) waitAnswer(ctx context.Context) error {
	for {
		err := s.ping(ctx)
		if err == nil {
			return nil
		}
		if s.Starts() > 1 {
			return fmt.Errorf("redis-server in %s dies right after its start, see the log: %w", s.dir, err)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for redis-server in %s to answer (%v): %w", s.dir, err, context.Cause(ctx))
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// ping asks the server once whether it serves: while it still loads its data it answers, but not PONG.
func (s *Server) ping(ctx context.Context) error {
	conn, err := s.dial(ctx)
	if err != nil {
		return err
	}
	defer conn.Close()
	if _, err := io.WriteString(conn, "PING\r\n"); err != nil {
		return err
	}
	answer, err := bufio.NewReader(conn).ReadString('\n')
	if err != nil {
		return err
	}
	if strings.TrimSpace(answer) != "+PONG" {
		return fmt.Errorf("answer %.80q", answer)
	}
	return nil
}

// dial connects to the server, for one question and its answer within a second.
func (s *Server) dial(ctx context.Context) (net.Conn, error) {
	conn, err := (&net.Dialer{Timeout: time.Second}).DialContext(ctx, "unix", s.socket)
	if err != nil {
		return nil, err
	}
	if err := conn.SetDeadline(time.Now().Add(time.Second)); err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	return conn, nil
}
