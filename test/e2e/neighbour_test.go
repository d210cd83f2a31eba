package e2e

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/ephemeral-run/ephemeral/client"
	"github.com/ephemeral-run/ephemeral/run"
)

// busy is what a well-behaved guest does that makes use of its processor: what a hostile one may cost its neighbours is
// compared with that, since a busy guest takes a processor of the host as well.
const busy = "while :; do :; done"

// attacks are what guests do to harm the others.
var attacks = []struct {
	name    string
	request client.Request
}{
	{"packets", client.Request{Command: `python3 -c '
import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
while True:
    for address in ("255.255.255.255", "10.0.0.1"):
        try: s.sendto(b"x" * 1400, (address, 9))
        except OSError: pass'`}},
	{"connections to the host", client.Request{ExposeBroker: true, Command: `python3 -c '
import socket
open = []
while True:
    try:
        s = socket.create_connection(("broker.local", 80), 1)
        s.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 1000000\r\n\r\n")
        open.append(s)
    except OSError: open = open[len(open) // 2:]
    for port in range(1, 4000, 97):
        try:
            v = socket.socket(socket.AF_VSOCK); v.settimeout(0.01); v.connect((2, port))
        except OSError: pass'`}},
	{"processes", client.Request{Command: "bomb() { bomb | bomb & }; bomb; sleep 1000"}},
	{"memory", client.Request{Command: `while :; do python3 -c '
x = []
while True: x.append(bytearray(1 << 20))'; done`}},
	{"output", client.Request{Command: "yes flood & yes flood >&2 & cat /dev/urandom"}},
	{"files", client.Request{Command: `cat /dev/zero > big & i=0; while :; do i=$((i+1)); : > $i; echo $i > /dev/shm/$i; done`}},
}

// toll is what a server and its machines take of the host.
type toll struct {
	server, redis int64 // bytes, resident
	files         int   // open in the server
}

func (s *server) toll() (toll, error) {
	redis, err := redisPid(s.data)
	if err != nil {
		return toll{}, err
	}
	var u toll
	for pid, to := range map[int]*int64{s.cmd.Process.Pid: &u.server, redis: &u.redis} {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid))
		if err != nil {
			return u, err
		}
		pages, err := strconv.ParseInt(strings.Fields(string(b))[1], 10, 64)
		if err != nil {
			return u, err
		}
		*to = pages * int64(os.Getpagesize())
	}
	open, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", s.cmd.Process.Pid))
	u.files = len(open)
	return u, err
}

// cgroupMemory is the most that any machine's cgroup has used, in bytes, of those that are there now.
func (s *server) cgroupMemory() (most int64) {
	node, err := os.ReadFile(filepath.Join(s.data, "node"))
	if err != nil {
		return 0
	}
	for _, pattern := range []string{"/sys/fs/cgroup/memory/*/%s/*/memory.usage_in_bytes", "/sys/fs/cgroup/*/%s/*/memory.current"} {
		files, _ := filepath.Glob(fmt.Sprintf(pattern, strings.TrimSpace(string(node))))
		for _, file := range files {
			if b, err := os.ReadFile(file); err == nil {
				n, _ := strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
				most = max(most, n)
			}
		}
	}
	return most
}

// The memory of a machine of the tests' servers, in MiB: the guest's, and the most that its VMM may use beside.
const (
	guestMiB  = 512
	beyondMiB = 256
)

// mostGrowth is how much more a server may take, in bytes: its garbage is collected when its heap is twice what it was, and
// that is counted from 64 MiB (gateway.heapFloor).
const mostGrowth = raceMemory * 320 << 20

// TestHostileNeighbours: whatever a guest does, runs of others succeed beside it; no machine takes more memory than its limit,
// and server and Redis no more than they need; and when it is over, everything is as it was. In `make chaos` it also measures:
// the median latency of `command: "true"` beside a hostile guest is at most twice that beside a busy one, and the server comes
// back to its size after all of it twice.
func TestHostileNeighbours(t *testing.T) {
	looks, passes, measured := 1, 1, os.Getenv("EPHEMERAL_CHAOS") != ""
	if measured {
		looks, passes = 5, 2
	}
	s := startOwn(t, "EPHEMERAL_POOL_MAX_MACHINES=4", "EPHEMERAL_POOL_MIN_READY=1", "EPHEMERAL_POOL_MAX_READY=1")
	hostile, other := s.tenant(t, 10_000_000), s.tenant(t, 10_000_000)
	other.beside(t, hostile, client.Request{Command: busy}, looks) // everything has been used once
	before := s.rested(t)
	calm := other.beside(t, hostile, client.Request{Command: busy}, looks)
	var all []toll // the worst of each pass
	for range passes {
		var worst toll
		for _, a := range attacks {
			took := other.beside(t, hostile, a.request, looks)
			u, err := s.toll()
			if err != nil {
				t.Error(err)
			}
			worst = toll{max(worst.server, u.server), max(worst.redis, u.redis), max(worst.files, u.files)}
			t.Logf("%s: a run beside it took %s, beside a busy guest %s: %.2f times", a.name, took.Round(time.Millisecond),
				calm.Round(time.Millisecond), took.Seconds()/calm.Seconds())
			if measured && took > 2*calm {
				again := other.beside(t, hostile, client.Request{Command: busy}, looks) // the host itself may have become slower
				if took > 2*max(calm, again) {
					t.Errorf("%s: a neighbour takes %s instead of %s", a.name, took, max(calm, again))
				}
			}
		}
		all = append(all, worst)
	}
	after := s.rested(t)
	t.Logf("server %d MiB before, %d after; Redis %d, %d; open files %d, %d; the worst: %+v", before.server>>20, after.server>>20,
		before.redis>>20, after.redis>>20, before.files, after.files, all)
	for _, worst := range all {
		if grown := worst.server - before.server; grown > mostGrowth {
			t.Errorf("the server grew by %d MiB", grown>>20)
		}
		if grown := worst.redis - before.redis; grown > 96<<20 { // the output of the runs is kept
			t.Errorf("Redis grew by %d MiB", grown>>20)
		}
	}
	if measured {
		s.shrinks(t, before.server+afterwards)
	}
	if after.files > before.files+10 {
		t.Errorf("%d open files became %d", before.files, after.files)
	}
}

// afterwards is how much more a server may keep when its garbage has been collected, in bytes.
const afterwards = raceMemory * 48 << 20

// shrinks demands that a server comes back to a size. What it needed at most is garbage then, but that is collected when as
// much again has been allocated, or after two minutes (runtime.forcegcperiod); peaks say nothing of what is kept.
func (s *server) shrinks(t *testing.T, size int64) {
	t.Helper()
	began := time.Now()
	var u toll
	for time.Since(began) < 6*time.Minute {
		var err error
		if u, err = s.toll(); err != nil {
			t.Fatal(err)
		}
		if u.server <= size {
			t.Logf("the server takes %d MiB, %s after the last", u.server>>20, time.Since(began).Round(time.Second))
			return
		}
		time.Sleep(time.Second)
	}
	t.Errorf("the server still takes %d MiB, want at most %d", u.server>>20, size>>20)
}

// beside has another's run go on, and returns the median time of runs of "true" beside it. It ends the other's.
func (n *tenant) beside(t *testing.T, hostile *tenant, r client.Request, looks int) time.Duration {
	t.Helper()
	r.TimeoutSeconds, r.MaxCostMicros = 120, 400_000
	created, err := hostile.CreateRun(t.Context(), r, client.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	hostile.until(t, created.Run.ID, run.EventWorkerStarted)
	time.Sleep(2 * time.Second) // it gets going, and the pool is filled again
	watch, stop := context.WithCancel(t.Context())
	most := make(chan int64, 1)
	go func() { most <- n.server.watchMemory(watch) }()
	var all []time.Duration
	for range looks {
		began := time.Now()
		if got := n.finish(t, client.Request{Command: "true"}); got.State != run.Succeeded {
			t.Errorf("a run beside %.40q ended %s, %+v", r.Command, got.State, got.Error)
		}
		all = append(all, time.Since(began))
		time.Sleep(time.Second) // the pool makes another machine, which is not what is measured
	}
	stop()
	if got := <-most; got > (guestMiB+beyondMiB)<<20 {
		t.Errorf("a machine took %d MiB", got>>20)
	}
	if _, err := hostile.Cancel(t.Context(), created.Run.ID); err != nil && problem(err) == nil { // refused: it has ended
		t.Error(err)
	}
	hostile.ended(t, created.Run.ID)
	slices.Sort(all)
	return all[len(all)/2]
}

// watchMemory looks for the most that a machine takes until ctx ends.
func (s *server) watchMemory(ctx context.Context) (most int64) {
	for ctx.Err() == nil {
		most = max(most, s.cgroupMemory())
		select {
		case <-time.After(50 * time.Millisecond):
		case <-ctx.Done():
		}
	}
	return most
}

// rested is the toll when nothing is there but the pool's machines.
func (s *server) rested(t *testing.T) (u toll) {
	t.Helper()
	var left remains
	eventually(t, time.Minute, "there is nothing but a machine and a spare", func() bool {
		var err error
		left, err = s.lookAround()
		return err == nil && left.whole() == nil && len(left.ids()) == 2
	})
	u, err := s.toll()
	if err != nil {
		t.Fatal(err)
	}
	return u
}
