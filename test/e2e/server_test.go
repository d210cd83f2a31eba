// Package e2e tests the whole product from the outside: the real binary, real machines, a real Redis.
package e2e

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
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/ephemeral-run/ephemeral/client"
	"github.com/ephemeral-run/ephemeral/gateway/apitest"
	"github.com/ephemeral-run/ephemeral/run"
	"github.com/ephemeral-run/ephemeral/run/tracing/tracingtest"
	"github.com/ephemeral-run/ephemeral/vmm/jail"
	"github.com/ephemeral-run/ephemeral/vmm/provision"
)

// Time limits are wide: machines are emulated on hosts without usable KVM, and the tests of several packages share them.
const (
	startLimit = 3 * time.Minute // of a server, the making of a template included
	runLimit   = 90 * time.Second
)

// binaries are built once for all tests.
var binaries struct{ dir, ephemeral string }

// shared is the server that most tests use.
var shared *server

func TestMain(m *testing.M) { os.Exit(testMain(m)) }

func testMain(m *testing.M) int {
	dir, err := os.MkdirTemp("", "eph-e2e-")
	if err != nil {
		return report(err)
	}
	defer os.RemoveAll(dir)
	if err := os.Chmod(dir, 0o711); err != nil { // machines run as other users, who have to pass through
		return report(err)
	}
	binaries.dir, binaries.ephemeral = dir, filepath.Join(dir, "ephemeral")
	build := exec.Command("go", append([]string{"build", "-buildvcs=false", "-o", binaries.ephemeral}, append(raceFlag, "../../cmd/ephemeral")...)...)
	if out, err := build.CombinedOutput(); err != nil {
		return report(fmt.Errorf("build ephemeral: %w\n%s", err, out))
	}
	shared, err = start(filepath.Join(dir, "data"))
	if err != nil {
		return report(err)
	}
	code := m.Run()
	if err := shared.stop(); err != nil && code == 0 {
		return report(err)
	}
	residue, err := shared.residue()
	if err == nil && residue.Total() > 0 {
		err = fmt.Errorf("left behind by the server: %+v", residue)
	}
	if err != nil {
		return max(code, report(err))
	}
	return code
}

func report(err error) int {
	fmt.Fprintln(os.Stderr, err)
	return 1
}

// server is a running `ephemeral serve`.
type server struct {
	data   string
	env    []string
	listen string
	cmd    *exec.Cmd
	log    *bytes.Buffer
	ended  chan error
	within []string     // command that becomes the server, with its arguments before the server's; empty: none
	tap    func([]byte) // sees the log as it is written; nil: nobody does

	collector *tracingtest.Collector // of the server's traces; nil: it sends none
}

// start starts a server on the data directory and returns when it is ready. More variables may be given.
func start(data string, env ...string) (*server, error) {
	s, err := newServer(data, env...)
	if err != nil {
		return nil, err
	}
	return s, s.launch()
}

// newServer is a server that is not started yet.
func newServer(data string, env ...string) (*server, error) {
	image, err := filepath.Abs("../../build/images")
	if err != nil {
		return nil, err
	}
	if dir := os.Getenv("EPHEMERAL_TEST_IMAGE"); dir != "" {
		image = filepath.Dir(dir)
	}
	if _, err := os.Stat(filepath.Join(image, "base", "manifest.json")); err != nil {
		return nil, fmt.Errorf("no image: run make image: %w", err)
	}
	replay, err := filepath.Abs("testdata/replay")
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
	s := &server{data: data, listen: listen, log: new(bytes.Buffer), ended: make(chan error, 1)}
	s.env = append(os.Environ(), "EPHEMERAL_DATA_DIR="+data, "EPHEMERAL_IMAGE_DIR="+image, "EPHEMERAL_LISTEN="+listen,
		"EPHEMERAL_ADMIN_LISTEN="+admin, "EPHEMERAL_REPLAY_DIR="+replay, "EPHEMERAL_URL=http://"+listen,
		"EPHEMERAL_REDIS_URL=", "EPHEMERAL_POOL_MAX_MACHINES=6", "EPHEMERAL_NODE_DRAIN=2s", "EPHEMERAL_LOG_LEVEL=debug")
	s.env = append(s.env, env...)
	return s, nil
}

// launch starts the process and waits until it is ready.
func (s *server) launch() error {
	if err := s.begin(); err != nil {
		return err
	}
	return s.ready()
}

// begin starts the process.
func (s *server) begin() error {
	args := append(slices.Clone(s.within), binaries.ephemeral, "serve")
	s.cmd = exec.Command(args[0], args[1:]...)
	s.cmd.Env = s.env
	out := &locked{w: s.log, tap: s.tap}
	s.cmd.Stdout, s.cmd.Stderr = out, out
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := s.cmd.Start(); err != nil {
		return fmt.Errorf("start the server: %w", err)
	}
	ended := make(chan error, 1)
	s.ended = ended
	go func() { ended <- s.cmd.Wait() }()
	return nil
}

// ready waits until the server is.
func (s *server) ready() error {
	ended, out := s.ended, s.cmd.Stdout
	deadline := time.Now().Add(startLimit)
	for time.Now().Before(deadline) {
		select {
		case err := <-ended:
			ended <- err
			return fmt.Errorf("the server ended at its start: %w\n%s", err, out)
		default:
		}
		if resp, err := http.Get("http://" + s.listen + "/readyz"); err == nil {
			resp.Body.Close()
			if resp.StatusCode == http.StatusOK {
				return nil
			}
		}
		time.Sleep(50 * time.Millisecond)
	}
	_ = s.cmd.Process.Kill()
	return fmt.Errorf("the server was not ready within %s:\n%s", startLimit, out)
}

// stop ends the server as an operator would, and tells whether it ended well.
func (s *server) stop() error {
	if err := s.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		return fmt.Errorf("signal the server: %w", err)
	}
	select {
	case err := <-s.ended:
		s.ended <- err
		if err != nil {
			return fmt.Errorf("the server ended badly: %w\n%s", err, s.cmd.Stderr)
		}
		return nil
	case <-time.After(time.Minute):
		_ = s.cmd.Process.Kill()
		return fmt.Errorf("the server did not end within a minute:\n%s", s.cmd.Stderr)
	}
}

// kill ends the server at once, with everything that dies with it.
func (s *server) kill() {
	_ = s.cmd.Process.Kill()
	err := <-s.ended
	s.ended <- err
}

// residue counts what is there of the server's node on the host. The server must not be running.
func (s *server) residue() (provision.Residue, error) {
	c := provision.Config{
		DataDir: s.data, MemoryMiB: 512, VCPUs: 1, Rest: provision.RestAuto, TemplateTimeout: time.Minute,
		Jail: jail.Config{Bubblewrap: "bwrap", RunDir: "/run/ephemeral", Cgroup: "ephemeral", FirstUID: 20000, UIDs: 10000,
			OverheadMiB: 256, Pids: 128, CPUWeight: 50, OpenFiles: 1024, OOMScoreAdj: 500},
	}
	id, err := c.NodeID()
	if err != nil {
		return provision.Residue{}, err
	}
	c.Node, c.Jail.Node = id, id
	return provision.Survey(c)
}

// cli runs a command of the binary with the server's settings and returns what it printed.
func (s *server) cli(ctx context.Context, env []string, args ...string) (stdout, stderr string, err error) {
	cmd := exec.CommandContext(ctx, binaries.ephemeral, args...)
	cmd.Env = append(s.env, env...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err = cmd.Run()
	return out.String(), errs.String(), err
}

// json runs a command with --output json and decodes what it printed.
func (s *server) json(t *testing.T, v any, args ...string) {
	t.Helper()
	out, errs, err := s.cli(t.Context(), nil, append(args, "--output", "json")...)
	if err != nil {
		t.Fatalf("ephemeral %s: %v\n%s", strings.Join(args, " "), err, errs)
	}
	if err := json.Unmarshal([]byte(out), v); err != nil {
		t.Fatalf("ephemeral %s printed no JSON: %v\n%s", strings.Join(args, " "), err, out)
	}
}

// tenant is an organisation with one member key.
type tenant struct {
	*client.Client
	org, key string
	server   *server
}

// tenant makes an organisation with credit.
func (s *server) tenant(t *testing.T, credit run.Micros) *tenant {
	t.Helper()
	var org run.Org
	s.json(t, &org, "orgs", "create", "test")
	if credit > 0 {
		var account run.Account
		s.json(t, &account, "orgs", "credit", org.ID, fmt.Sprint(int64(credit)))
	}
	var key client.NewKey
	s.json(t, &key, "keys", "create", "--org", org.ID, "--name", "test")
	c, err := client.New("http://"+s.listen, key.Secret, client.WithTransport(apitest.Transport{Next: http.DefaultTransport, Report: t.Errorf}))
	if err != nil {
		t.Fatal(err)
	}
	return &tenant{c, org.ID, key.Secret, s}
}

// finish posts a request and returns the run when it has ended.
func (n *tenant) finish(t *testing.T, r client.Request) run.Run {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), runLimit)
	defer cancel()
	created, err := n.CreateRun(ctx, r, client.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return n.ended(t, created.Run.ID)
}

// ended waits for the end of a run.
func (n *tenant) ended(t *testing.T, id run.ID) run.Run {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), runLimit)
	defer cancel()
	r, err := n.Wait(ctx, id)
	if err != nil {
		t.Fatalf("%v\n%s", err, n.server.cmd.Stderr)
	}
	return r
}

// events returns the whole timeline of an ended run.
func (n *tenant) events(t *testing.T, id run.ID) []run.Event {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), runLimit)
	defer cancel()
	var all []run.Event
	for e, err := range n.Events(ctx, id, 0) {
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, e)
	}
	return all
}

// until reads a run's events until one is of the type.
func (n *tenant) until(t *testing.T, id run.ID, typ run.EventType) run.Event {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), runLimit)
	defer cancel()
	for e, err := range n.Events(ctx, id, 0) {
		if err != nil {
			t.Fatal(err)
		}
		if e.Type == typ {
			return e
		}
	}
	t.Fatalf("%s ended without an event %s", id, typ)
	return run.Event{}
}

// checked is a client whose exchanges are held against the API's description.
func checked(t *testing.T) *http.Client {
	return &http.Client{Transport: apitest.Transport{Next: http.DefaultTransport, Report: t.Errorf}}
}

// post sends a raw request body and returns status, headers and the decoded answer.
func (n *tenant) post(t *testing.T, body string, headers map[string]string) (int, http.Header, map[string]any) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+n.server.listen+"/v1/runs", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+n.key)
	req.Header.Set("Content-Type", "application/json")
	for k, v := range headers {
		req.Header.Set(k, v)
	}
	resp, err := checked(t).Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	var answer map[string]any
	if err := json.Unmarshal(b, &answer); err != nil {
		t.Fatalf("status %d, no JSON: %v\n%s", resp.StatusCode, err, b)
	}
	return resp.StatusCode, resp.Header, answer
}

// problem is the server's refusal in an error, nil if there is none.
func problem(err error) *client.Problem {
	var p *client.Problem
	errors.As(err, &p)
	return p
}

// freeAddress is a loopback address that nobody listens on.
func freeAddress() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", fmt.Errorf("find a free port: %w", err)
	}
	return l.Addr().String(), l.Close()
}

// machineProcesses are the processes of the host whose command line names the machine.
func machineProcesses(machine string) ([]string, error) {
	dirs, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return nil, err
	}
	var found []string
	for _, dir := range dirs {
		b, err := os.ReadFile(filepath.Join(dir, "cmdline"))
		if err != nil {
			continue // it ended meanwhile
		}
		if bytes.Contains(b, []byte(machine)) {
			found = append(found, filepath.Base(dir))
		}
	}
	return found, nil
}

// leftOf lists what is on the host of one machine: processes, tap, directory, cgroups.
func (s *server) leftOf(t *testing.T, machine string) []string {
	t.Helper()
	var left []string
	processes, err := machineProcesses(machine)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range processes {
		left = append(left, "process "+p)
	}
	if _, err := os.Stat(filepath.Join(s.data, "machines", machine)); !errors.Is(err, os.ErrNotExist) {
		left = append(left, "directory")
	}
	_ = filepath.WalkDir("/sys/fs/cgroup", func(path string, d os.DirEntry, err error) error {
		if err == nil && d.IsDir() && strings.Contains(d.Name(), machine) {
			left = append(left, "cgroup "+path)
		}
		return nil
	})
	for _, pid := range s.namespaces(t) {
		f, err := os.Open("/proc/" + pid + "/net/dev")
		if err != nil {
			continue
		}
		lines := bufio.NewScanner(f)
		for lines.Scan() {
			if strings.Contains(lines.Text(), "eph"+machine) {
				left = append(left, "tap in the namespace of "+pid)
			}
		}
		f.Close()
	}
	return left
}

// namespaces are the threads of the server, one of which lives in the node's network namespace.
func (s *server) namespaces(t *testing.T) []string {
	t.Helper()
	tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", s.cmd.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	var pids []string
	for _, task := range tasks {
		pids = append(pids, task.Name())
	}
	return pids
}
