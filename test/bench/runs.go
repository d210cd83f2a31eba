package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/ephemeral-run/ephemeral/client"
	ephemeral "github.com/ephemeral-run/ephemeral/run"
)

// runs measures runs on a server with the product's defaults and the template that is in the data directory.
func runs(ctx context.Context, o options, data string) ([]row, error) {
	s, err := serve(ctx, o, data)
	if err != nil {
		return nil, err
	}
	defer s.stop()
	c, err := s.client(ctx)
	if err != nil {
		return nil, err
	}
	var ready, whole []time.Duration
	_, err = repeat(ctx, o.rounds, "runs of command true", func() (time.Duration, error) {
		if err := s.pause(ctx); err != nil {
			return 0, err
		}
		began := time.Now()
		created, err := c.CreateRun(ctx, client.Request{Command: "true"}, client.CreateOptions{Wait: time.Minute})
		if err != nil {
			return 0, err
		}
		r := created.Run
		if r.State != ephemeral.Succeeded || r.StartedAt == nil {
			return 0, fmt.Errorf("run %s ended %s: %+v", r.ID, r.State, r.Error)
		}
		whole = append(whole, time.Since(began))
		ready = append(ready, r.StartedAt.Sub(r.QueuedAt))
		return 0, nil
	})
	if err != nil {
		return nil, err
	}
	first := measured("run.ready", "ms", ready)
	first.Baseline, first.most, first.mostRatio = "vm.cold_boot", 50, 1.0/50
	return []row{first, measured("run.command", "ms", whole)}, nil
}

// server is a running `ephemeral serve`.
type server struct {
	program string
	env     []string
	url     string
	cmd     *exec.Cmd
	log     bytes.Buffer
}

func serve(ctx context.Context, o options, data string) (*server, error) {
	image, err := filepath.Abs(o.image)
	if err != nil {
		return nil, err
	}
	listen, err := freeAddress()
	if err != nil {
		return nil, err
	}
	admin, err := freeAddress()
	if err != nil {
		return nil, err
	}
	s := &server{program: o.ephemeral, url: "http://" + listen}
	s.env = append(os.Environ(), "EPHEMERAL_DATA_DIR="+data, "EPHEMERAL_IMAGE_DIR="+filepath.Dir(image), "EPHEMERAL_LISTEN="+listen,
		"EPHEMERAL_ADMIN_LISTEN="+admin, "EPHEMERAL_REDIS_URL=", "EPHEMERAL_URL="+s.url)
	s.cmd = exec.Command(s.program, "serve")
	s.cmd.Env, s.cmd.Stdout, s.cmd.Stderr = s.env, &s.log, &s.log
	if err := s.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start the server: %w", err)
	}
	c, err := client.New(s.url, "", client.WithMaxOutage(0))
	if err != nil {
		return nil, err
	}
	for deadline := time.Now().Add(3 * time.Minute); c.Ready(ctx) != nil; time.Sleep(50 * time.Millisecond) {
		if time.Now().After(deadline) || ctx.Err() != nil {
			s.stop()
			return nil, fmt.Errorf("the server was not ready in time:\n%s", &s.log)
		}
	}
	return s, nil
}

// pause lets the pool fill up again and the host calm down: a run that has to wait for a refill is not what is measured.
func (s *server) pause(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(1500 * time.Millisecond):
		return nil
	}
}

func (s *server) stop() {
	_ = s.cmd.Process.Signal(syscall.SIGTERM)
	_ = s.cmd.Wait()
}

// client makes an organisation with credit and a key, as an operator does.
func (s *server) client(ctx context.Context) (*client.Client, error) {
	cli := func(args ...string) (string, error) {
		cmd := exec.CommandContext(ctx, s.program, args...)
		cmd.Env = s.env
		out, err := cmd.Output()
		if err != nil {
			return "", fmt.Errorf("ephemeral %s: %w", strings.Join(args, " "), err)
		}
		return strings.TrimSpace(string(out)), nil
	}
	out, err := cli("orgs", "create", "bench", "--output", "json")
	if err != nil {
		return nil, err
	}
	var org ephemeral.Org
	if err := json.Unmarshal([]byte(out), &org); err != nil {
		return nil, err
	}
	if _, err := cli("orgs", "credit", org.ID, "100000000"); err != nil {
		return nil, err
	}
	key, err := cli("keys", "create", "--org", org.ID)
	if err != nil {
		return nil, err
	}
	return client.New(s.url, key)
}

// freeAddress is a loopback address that nobody listens on.
func freeAddress() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", fmt.Errorf("find a free port: %w", err)
	}
	return l.Addr().String(), l.Close()
}
