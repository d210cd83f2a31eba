// Package redistest starts redis-servers for tests that need more than one: over TCP, with replicas and a Sentinel. They are
// real, and end with their test.
package redistest

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

// Server is a redis-server of a test's own, over TCP, as replication needs it. It is a client of itself.
type Server struct {
	*redis.Client
	Port int
	Cmd  *exec.Cmd
	t    *testing.T
}

// FreePort is a TCP port that nobody listens on. A cluster node needs a second one, 10,000 above.
func FreePort(t *testing.T) int {
	t.Helper()
	for range 100 {
		l, err := net.Listen("tcp4", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		port := l.Addr().(*net.TCPAddr).Port
		l.Close()
		if port+10_000 < 65_536 {
			if bus, err := net.Listen("tcp4", fmt.Sprintf("127.0.0.1:%d", port+10_000)); err == nil {
				bus.Close()
				return port
			}
		}
	}
	t.Fatal("no free pair of ports")
	return 0
}

// Start starts a server that appends to a file and returns when it answers. The arguments are further ones of redis-server.
func Start(t *testing.T, args ...string) *Server {
	t.Helper()
	return start(t, append(args, "--dir", t.TempDir(), "--save", "", "--appendonly", "yes", "--repl-diskless-sync-delay", "0")...)
}

func start(t *testing.T, args ...string) *Server {
	t.Helper()
	s := &Server{t: t, Port: FreePort(t)}
	s.Cmd = exec.Command("redis-server", append(args, "--port", fmt.Sprint(s.Port), "--bind", "127.0.0.1")...)
	s.Cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := s.Cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		s.Cmd.Process.Kill()
		s.Cmd.Wait()
	})
	s.Client = redis.NewClient(&redis.Options{Addr: s.Addr(), DisableIdentity: true})
	t.Cleanup(func() { s.Close() })
	s.Until("it answers", func(ctx context.Context) bool { return s.Ping(ctx).Err() == nil })
	return s
}

// Addr is the server's host and port.
func (s *Server) Addr() string { return fmt.Sprintf("127.0.0.1:%d", s.Port) }

// Until waits until ok, and fails the test after 20 seconds.
func (s *Server) Until(what string, ok func(context.Context) bool) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	for !ok(ctx) {
		if ctx.Err() != nil {
			s.t.Fatalf("not within 20 s: %s", what)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// Replicas starts replicas of the server and waits until they follow.
func (s *Server) Replicas(n int) (list []*Server) {
	s.t.Helper()
	for range n {
		r := Start(s.t, "--replicaof", "127.0.0.1 "+fmt.Sprint(s.Port))
		r.Until("it follows", func(ctx context.Context) bool {
			return strings.Contains(r.Info(ctx, "replication").Val(), "master_link_status:up")
		})
		list = append(list, r)
	}
	return list
}

// Sentinel starts a Sentinel that replaces the server by one of its replicas once it has been silent for two seconds, and
// returns the URL of the cell. On a busy host a shorter silence may be a primary that forks for a replica, and replacing it
// by one that is still copying loses everything.
func (s *Server) Sentinel(replicas int) (url string) {
	s.t.Helper()
	conf := filepath.Join(s.t.TempDir(), "sentinel.conf")
	if err := os.WriteFile(conf, fmt.Appendf(nil, `sentinel monitor cell 127.0.0.1 %d 1
sentinel down-after-milliseconds cell 2000
sentinel failover-timeout cell 6000
dir %s
`, s.Port, filepath.Dir(conf)), 0o600); err != nil {
		s.t.Fatal(err)
	}
	sentinel := start(s.t, conf, "--sentinel")
	watch := redis.NewSentinelClient(&redis.Options{Addr: sentinel.Addr(), DisableIdentity: true})
	s.t.Cleanup(func() { watch.Close() })
	sentinel.Until("it knows the replicas", func(ctx context.Context) bool {
		return len(watch.Replicas(ctx, "cell").Val()) == replicas
	})
	return "redis://" + sentinel.Addr() + "?master_name=cell"
}
