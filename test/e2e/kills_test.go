package e2e

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/ephemeral-run/ephemeral/client"
	"github.com/ephemeral-run/ephemeral/run"
	"github.com/ephemeral-run/ephemeral/run/pools"
)

// Whom TestKills kills.
const (
	victimServer = "server"
	victimVMM    = "vmm"
	victimAgent  = "agent"
	victimRedis  = "redis"
	victimHung   = "hung redis" // it is stopped, and goes on after hangTime
)

// victims are all of them.
var victims = []string{victimServer, victimVMM, victimAgent, victimRedis, victimHung}

// hangTime is less than what a run has paid ahead in its first moments.
const hangTime = 1500 * time.Millisecond

// anyTime stands for no step: the victim is killed at a random time.
const anyTime = "any time"

// steps of a run, by the names that the node logs; "queued" is the moment when the client was told that it was accepted.
var killSteps = map[string][]string{
	victimServer: {"queued", "claim", "resume", "prepare", "files", "worker", "collect", "destroy", "settle", anyTime},
	victimVMM:    {"resume", "prepare", "files", "worker", "collect", "destroy", anyTime},
	victimAgent:  {"files", "worker", anyTime},
	victimRedis:  {"queued", "claim", "resume", "prepare", "files", "worker", "collect", "destroy", "settle", anyTime},
	victimHung:   {"queued", "claim", "resume", "prepare", "files", "worker", "settle"},
}

// kill is one of the kills of TestKills.
type kill struct {
	victim, step string
	after        time.Duration // from when the step was seen to begin
	command      string        // of the run that is watched
}

func (k kill) String() string { return fmt.Sprintf("%s at %s + %s", k.victim, k.step, k.after) }

// shortKills are those of `make test`: each victim, at steps that differ.
var shortKills = []kill{
	{victimServer, "prepare", 0, "true"}, {victimVMM, "worker", 100 * time.Millisecond, "sleep 30"},
	{victimRedis, "settle", 0, "true"}, {victimAgent, "worker", 0, ""}, {victimServer, "worker", 50 * time.Millisecond, "sleep 30"},
	{victimRedis, "prepare", 0, "echo x"}, {victimHung, "resume", 0, "true"}, {victimVMM, "prepare", 0, "true"}, {victimServer, "destroy", 0, "true"},
}

// kills is the sequence that a seed decides. The first ones go through all victims and steps.
func kills(seed uint64, n int) (all []kill) {
	random := rand.New(rand.NewPCG(seed, 0))
	var table []kill
	for _, victim := range victims {
		for _, step := range killSteps[victim] {
			table = append(table, kill{victim: victim, step: step})
		}
	}
	for len(all) < n {
		random.Shuffle(len(table), func(i, j int) { table[i], table[j] = table[j], table[i] })
		for _, k := range table {
			k.after = time.Duration(random.IntN(25)) * time.Millisecond
			if k.step == anyTime {
				k.after = time.Duration(random.IntN(1500)) * time.Millisecond
			}
			k.command = []string{"true", "echo x > left", "sleep 0.2; seq 20000", "sleep 30"}[random.IntN(4)]
			if k.step == "collect" || k.step == "destroy" || k.step == "settle" {
				k.command = []string{"true", "head -c 300000 /dev/urandom > left"}[random.IntN(2)]
			}
			all = append(all, k)
		}
	}
	return all[:n]
}

// TestKillsAreDecidedBySeed: the same seed kills the same, another something else, and each victim comes at each step.
func TestKillsAreDecidedBySeed(t *testing.T) {
	a := kills(1, 100)
	if !slices.Equal(a, kills(1, 100)) || slices.Equal(a, kills(2, 100)) {
		t.Error("the seed does not decide")
	}
	for victim, steps := range killSteps {
		for _, step := range steps {
			if !slices.ContainsFunc(a, func(k kill) bool { return k.victim == victim && k.step == step }) {
				t.Errorf("%s is never killed at %s", victim, step)
			}
		}
	}
}

// TestKills kills server, VMMs, agents and Redis in the middle of runs, under load, and has Redis hang. After each kill the node comes back by
// itself, or is started again; then nothing is left of machines that died, each run has come to one end, and no money is
// lost. In `make chaos` it is a hundred kills (EPHEMERAL_CHAOS_KILLS), decided by a seed that it prints.
func TestKills(t *testing.T) {
	all := shortKills
	if os.Getenv("EPHEMERAL_CHAOS") != "" {
		n, seed := 100, rand.Uint64N(1<<32)
		for name, set := range map[string]func(uint64){
			"EPHEMERAL_CHAOS_KILLS": func(v uint64) { n = int(v) }, "EPHEMERAL_CHAOS_SEED": func(v uint64) { seed = v },
		} {
			if text := os.Getenv(name); text != "" {
				v, err := strconv.ParseUint(text, 10, 64)
				if err != nil {
					t.Fatalf("%s: %v", name, err)
				}
				set(v)
			}
		}
		all = kills(seed, n)
		t.Logf("%d kills of EPHEMERAL_CHAOS_SEED=%d", n, seed)
	}
	h := newHunt(t)
	times := map[string][]time.Duration{}
	for i, k := range all {
		if end, ok := t.Deadline(); ok && time.Until(end) < roundLimit {
			t.Errorf("the test's time is up after %d of %d kills", i, len(all)) // and its server must not outlive it
			break
		}
		took := h.round(t, k)
		times[k.victim] = append(times[k.victim], took)
		t.Logf("kill %d, %s: served again after %s; %s", i+1, k, took.Round(time.Millisecond), h.told())
		if t.Failed() {
			t.Fatalf("the log:\n%s", lastLines(h.cmd.Stderr.(*locked).String(), 200))
		}
	}
	for _, victim := range victims {
		if all := times[victim]; len(all) > 0 {
			slices.Sort(all)
			t.Logf("%s killed %d times: served again after %s (median), %s (at most)", victim, len(all),
				all[len(all)/2].Round(time.Millisecond), all[len(all)-1].Round(time.Millisecond))
		}
	}
	t.Logf("%d runs came to their one end: %v", h.runs, h.ends)
}

// hunt is a server under load that is killed at.
type hunt struct {
	*server
	tenant *tenant
	load   *load
	rest   []string // what is there of the node beside its machines

	mu    sync.Mutex
	steps map[string]string // the machine that it had at a step, by run and step

	runs int
	ends map[string]int // by state or code of the error
	last string
}

// roundLimit bounds one kill with all that follows it.
const roundLimit = 4 * time.Minute

// huntMachines is how many machines there are at most, huntSpares how many hypervisor processes beside them that wait for one.
const (
	huntMachines = 3
	huntSpares   = 1
)

func newHunt(t *testing.T) *hunt {
	t.Helper()
	dir, err := os.MkdirTemp("", "eph-kills-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o711); err != nil { // machines run as other users, who have to pass through
		t.Fatal(err)
	}
	images := filepath.Join(dir, "images")
	if err := os.Mkdir(images, 0o755); err != nil {
		t.Fatal(err)
	}
	mortalImage(t, filepath.Join(images, "base"))
	s, err := newServer(filepath.Join(dir, "data"), "EPHEMERAL_IMAGE_DIR="+images, "EPHEMERAL_LEASE=3s",
		fmt.Sprintf("EPHEMERAL_POOL_MAX_MACHINES=%d", huntMachines), "EPHEMERAL_POOL_MIN_READY=1", "EPHEMERAL_POOL_MAX_READY=2",
		fmt.Sprintf("EPHEMERAL_POOL_SPARES=%d", huntSpares))
	if err != nil {
		t.Fatal(err)
	}
	h := &hunt{server: s, steps: map[string]string{}, ends: map[string]int{}}
	s.tap = h.read
	if err := s.launch(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.stop(); err != nil {
			t.Error(err)
		}
		if residue, err := s.residue(); err != nil || residue.Total() > 0 {
			t.Errorf("left behind: %+v, %v", residue, err)
		}
		if left, err := s.lookAround(); err != nil || len(left.ids()) > 0 {
			t.Errorf("left behind: %+v, %v", left, err)
		}
	})
	h.tenant = s.tenant(t, 1_000_000_000)
	h.load = &load{tenant: h.tenant}
	if err := h.quiet(); err != nil {
		t.Fatalf("%v\n%s", err, lastLines(h.cmd.Stderr.(*locked).String(), 100))
	}
	r, err := s.lookAround()
	if err != nil {
		t.Fatal(err)
	}
	h.rest = r.rest
	return h
}

var stepLine = regexp.MustCompile(`msg=step run=(\S+) step=(\S+) machine=(\S*)`)

// read looks for steps in the server's log.
func (h *hunt) read(p []byte) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, m := range stepLine.FindAllStringSubmatch(string(p), -1) {
		h.steps[m[1]+" "+m[2]] = strings.Trim(m[3], `"`)
	}
}

// await waits until a step of a run begins, and returns the machine that the run has by then.
func (h *hunt) await(id run.ID, step string) (machine string, err error) {
	for end := time.Now().Add(runLimit); time.Now().Before(end); time.Sleep(500 * time.Microsecond) {
		h.mu.Lock()
		machine, seen := h.steps[string(id)+" "+step]
		h.mu.Unlock()
		if seen {
			return machine, nil
		}
	}
	return "", fmt.Errorf("the run did not come to the step %s", step)
}

// round kills once, and returns how long it took until a new run was carried out. Afterwards all is quiet.
func (h *hunt) round(t *testing.T, k kill) time.Duration {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), roundLimit)
	defer cancel()
	h.load.start(ctx, t)
	request := client.Request{Command: k.command, TimeoutSeconds: 60, Files: []run.File{{Path: "given", Content: "x"}}}
	if k.victim == victimAgent {
		request = agentsDeath(k)
	}
	created, err := h.tenant.CreateRun(ctx, request, client.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	h.load.note(created.Run.ID)
	machine := h.moment(t, k, created.Run.ID)
	before, err := h.lookAround()
	if err != nil {
		t.Fatal(err)
	}
	died := time.Now()
	dead := h.strike(t, k, machine, before)
	if k.victim == victimServer {
		if err := h.launch(); err != nil {
			t.Fatalf("%s: %v", k, err)
		}
	}
	r := h.tenant.finish(t, client.Request{Command: "true"})
	took := time.Since(died)
	h.load.note(r.ID)
	if r.State != run.Succeeded {
		t.Errorf("%s: the run after it ended %s, %+v", k, r.State, r.Error)
	}
	if _, err := h.tenant.Cancel(ctx, created.Run.ID); err != nil && problem(err) == nil { // refused: it has ended
		t.Error(err)
	}
	h.check(t, k, h.load.stop(), dead)
	return took
}

// agentsDeath is a run whose agent dies: while it gets its files, or later.
func agentsDeath(k kill) client.Request {
	r := client.Request{Command: "sleep 30", TimeoutSeconds: 60}
	if k.step == "files" {
		r.Files = []run.File{{Path: "a", Content: strings.Repeat("x", 100_000)}, {Path: deathNote}, {Path: "z", Content: strings.Repeat("x", 500_000)}}
	} else {
		r.Command = fmt.Sprintf("sleep %.3f; touch %s; sleep 30", k.after.Seconds(), deathNote)
	}
	return r
}

// moment waits for the time of a kill. It returns the machine of the run, if it has one by then.
func (h *hunt) moment(t *testing.T, k kill, id run.ID) (machine string) {
	t.Helper()
	step := k.step
	switch {
	case k.victim == victimAgent:
		step = "files" // it sees to the rest itself
	case step == "queued":
		time.Sleep(k.after)
		return ""
	case step == anyTime:
		step = "claim"
	}
	machine, err := h.await(id, step)
	if err != nil {
		t.Fatalf("%s: %v\n%s", k, err, lastLines(h.cmd.Stderr.(*locked).String(), 200))
	}
	if k.victim != victimAgent {
		time.Sleep(k.after)
	}
	return machine
}

// strike kills the victim, and returns the machines that die with it.
func (h *hunt) strike(t *testing.T, k kill, machine string, before remains) (dead []string) {
	t.Helper()
	switch k.victim {
	case victimServer:
		h.kill()
		return before.ids()
	case victimAgent:
		return []string{machine}
	case victimRedis, victimHung:
		pid, err := redisPid(h.data)
		if err != nil {
			t.Fatal(err)
		}
		if k.victim == victimRedis {
			_ = syscall.Kill(pid, syscall.SIGKILL)
			return nil
		}
		_ = syscall.Kill(pid, syscall.SIGSTOP)
		time.Sleep(hangTime)
		_ = syscall.Kill(pid, syscall.SIGCONT)
	case victimVMM:
		if machine == "" { // at any time: any of them
			if ids := before.machines[processes]; len(ids) > 0 {
				machine = ids[0]
			}
		}
		pids, err := machineProcesses("ephemeral-" + machine)
		if err != nil {
			t.Fatal(err)
		}
		for _, pid := range pids {
			n, err := strconv.Atoi(pid)
			if err != nil {
				t.Fatal(err)
			}
			_ = syscall.Kill(n, syscall.SIGKILL) // it may just have ended
		}
		return []string{machine}
	}
	return nil
}

// quiet waits until nothing is at work.
func (h *hunt) quiet() (err error) {
	for end := time.Now().Add(40 * time.Second); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		if err = h.settled(); err == nil {
			return nil
		}
	}
	return err
}

// settled is nil when nothing is at work: every machine there is is whole, and one of the pool's.
func (h *hunt) settled() error {
	r, err := h.lookAround()
	if err != nil {
		return err
	}
	if err := r.whole(); err != nil {
		return err
	}
	var all []pools.Pool
	if err := h.show(&all); err != nil {
		return err
	}
	if len(all) != 1 || len(all[0].Nodes) != 1 {
		return fmt.Errorf("pools %+v", all)
	}
	p := all[0].Nodes[0]
	if ids := r.ids(); p.Ready+huntSpares != len(ids) || p.Ready == 0 || p.Leased+p.Refilling+p.Destroying > 0 {
		return fmt.Errorf("the pool has %d ready machines, %d leased, %d refilling, %d being destroyed; on the host are %v", p.Ready, p.Leased, p.Refilling, p.Destroying, ids)
	}
	return nil
}
