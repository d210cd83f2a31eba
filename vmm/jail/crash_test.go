package jail

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/ephemeral-run/ephemeral/vmm"
	"github.com/ephemeral-run/ephemeral/vmm/network"
)

// life is what a helper process is to do: be a node that launches machines until it is killed.
type life struct {
	Config  Config
	Program string
	Cells   int // to launch before it says so; 0: go on launching and ending for ever
}

// helper is the main function of that process.
func helper() {
	var l life
	err := json.Unmarshal([]byte(os.Getenv(helperVariable)), &l)
	if err == nil {
		err = l.live()
	}
	fmt.Println("error:", err)
	os.Exit(1)
}

func (l life) live() error {
	ctx := context.Background()
	n, err := network.Open(ctx, l.Config.Node)
	if err != nil {
		return err
	}
	j, err := Open(l.Config)
	if err != nil {
		return err
	}
	fmt.Println("open")
	var pids []string
	for i := 0; l.Cells == 0 || i < l.Cells; i++ {
		c, err := j.New(fmt.Sprintf("cell-%d", i), Options{MemoryMiB: 32, Netns: n})
		if err != nil {
			return err
		}
		p, err := c.Launch(ctx, vmm.Command{Args: []string{l.Program, "sleep"}})
		if err != nil {
			return err
		}
		pids = append(pids, fmt.Sprint(p.Pid()))
		if l.Cells == 0 && i%3 == 2 {
			if err := c.Close(); err != nil {
				return err
			}
		}
	}
	fmt.Println(strings.Join(pids, " "))
	time.Sleep(time.Hour)
	return errors.New("nobody killed the helper")
}

// start starts a helper process and waits for its first line, which says that all is open.
func (l life) start(t *testing.T) (*exec.Cmd, *bufio.Reader) {
	t.Helper()
	b, err := json.Marshal(l)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), helperVariable+"="+string(b))
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	r := bufio.NewReader(out)
	if line, err := r.ReadString('\n'); line != "open\n" {
		t.Fatalf("helper says %q, %v", line, err)
	}
	return cmd, r
}

// newLife is a rig of the same node, as the node's next life opens it.
func newLife(t *testing.T, c Config) *rig {
	t.Helper()
	return newRig(t, func(own *Config) { *own = c })
}

// TestNodeKilled: machines die with their node; what else it leaves, its next life removes.
func TestNodeKilled(t *testing.T) {
	l := life{Config: testConfig(randomName(t, "jt-")), Program: hostileProgram(t), Cells: 3}
	node, out := l.start(t)
	line, err := out.ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	var pids []int
	for _, field := range strings.Fields(line) {
		pids = append(pids, atoi(t, field))
	}
	if len(pids) != l.Cells {
		t.Fatalf("helper says %q", line)
	}
	killed := time.Now()
	if err := node.Process.Signal(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	_ = node.Wait()
	for _, pid := range pids {
		for processExists(pid) {
			if time.Since(killed) > 5*time.Second {
				t.Fatalf("machine %d outlives its node", pid)
			}
			time.Sleep(time.Millisecond)
		}
	}
	t.Logf("%d machines ended %v after their node was killed", len(pids), time.Since(killed).Round(time.Millisecond))

	r := newLife(t, l.Config)
	left, err := r.Cgroups()
	if err != nil || !slices.Equal(left, []string{"cell-0", "cell-1", "cell-2"}) {
		t.Errorf("left are %v, %v", left, err)
	}
	stale, err := r.RemoveStale(t.Context())
	if want := (Stale{Cgroups: 3}); err != nil || stale != want {
		t.Errorf("removed %+v, %v, not %+v", stale, err, want)
	}
	if stale, err = r.RemoveStale(t.Context()); err != nil || stale != (Stale{}) {
		t.Errorf("the second time removed %+v, %v", stale, err)
	}
}

func processExists(pid int) bool {
	_, err := os.Stat(fmt.Sprintf("/proc/%d", pid))
	return err == nil
}

// TestNodeKilledWhileLaunching kills a node again and again, at moments that hit every step of a launch.
func TestNodeKilledWhileLaunching(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	l := life{Config: testConfig(randomName(t, "jt-")), Program: hostileProgram(t)}
	rounds := 25
	if testing.Short() {
		rounds = 5
	}
	cgroups := 0
	for range rounds {
		node, _ := l.start(t)
		time.Sleep(time.Duration(random.IntN(30_000)) * time.Microsecond)
		if err := node.Process.Signal(syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		_ = node.Wait()
		// What is in the cgroups now has a second to end by itself.
		deadline := time.Now().Add(time.Second)
		for slices.ContainsFunc(leftovers(t, l.Config), func(s string) bool { return strings.HasPrefix(s, "process") }) {
			if time.Now().After(deadline) {
				t.Fatalf("machines outlive their node: %v", leftovers(t, l.Config))
			}
			time.Sleep(time.Millisecond)
		}
		t.Run("next life", func(t *testing.T) {
			stale, err := newLife(t, l.Config).RemoveStale(t.Context())
			if err != nil || stale.Processes != 0 {
				t.Errorf("removed %+v, %v", stale, err)
			}
			cgroups += stale.Cgroups
		})
	}
	t.Logf("%d rounds left %d cgroups and no process", rounds, cgroups)
}

// TestRemoveStaleKills: a process that an earlier life left in a cgroup, and that nothing ended, is killed; none else is.
func TestRemoveStaleKills(t *testing.T) {
	r := newRig(t)
	bystander := exec.Command("sleep", "1000")
	if err := bystander.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = bystander.Process.Kill(); _ = bystander.Wait() }()
	mine := r.cell(t, 32)
	living := launchOrFail(t, mine, vmm.Command{Args: []string{hostileProgram(t), "sleep"}})

	g, err := r.cgroups.create("left", limits{memory: 64 << 20, pids: 10, weight: 50})
	if err != nil {
		t.Fatal(err)
	}
	orphan := exec.Command("sh", "-c", "sleep 1000 & sleep 1000; true")
	orphan.SysProcAttr = &syscall.SysProcAttr{}
	if err := r.network.Do(func() error { return g.start(orphan.SysProcAttr, orphan.Start) }); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() { _ = orphan.Wait(); close(ended) }()
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		if pids, err := g.pids(); err != nil || time.Now().After(deadline) {
			t.Fatalf("processes %v, %v", pids, err)
		} else if len(pids) == 3 {
			break
		}
	}
	stale, err := r.RemoveStale(t.Context())
	if want := (Stale{Cgroups: 1, Processes: 3}); err != nil || stale != want {
		t.Errorf("removed %+v, %v, not %+v", stale, err, want)
	}
	<-ended
	if !processExists(bystander.Process.Pid) || !processExists(living.Pid()) {
		t.Error("a process that is not stale was killed")
	}
}

// TestRemoveStaleGivesUp: a process that does not end costs RemoveStale its deadline, not more, and is reported.
func TestRemoveStaleGivesUp(t *testing.T) {
	r := newRig(t)
	g, err := r.cgroups.create("left", limits{memory: 64 << 20, pids: 10, weight: 50})
	if err != nil {
		t.Fatal(err)
	}
	orphan := exec.Command("sleep", "1000")
	orphan.SysProcAttr = &syscall.SysProcAttr{}
	if err := r.network.Do(func() error { return g.start(orphan.SysProcAttr, orphan.Start) }); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = r.RemoveStale(ctx)
	if !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "left") {
		t.Errorf("error is %v", err)
	}
	_ = orphan.Wait()
	if stale, err := r.RemoveStale(t.Context()); err != nil || stale.Cgroups != 1 {
		t.Errorf("then removed %+v, %v", stale, err)
	}
}

// TestRecycledPid: a process is signalled only if, pinned, it still is the one that was meant.
func TestRecycledPid(t *testing.T) {
	other := exec.Command("sleep", "1000")
	if err := other.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() { _ = other.Wait(); close(ended) }()
	pid := other.Process.Pid

	killed, err := killPinned(pid, func() (bool, error) { return false, nil })
	if killed || err != nil || !processExists(pid) {
		t.Errorf("recycled: killed %v, %v", killed, err)
	}
	failure := errors.New("cannot look")
	if killed, err := killPinned(pid, func() (bool, error) { return false, failure }); killed || !errors.Is(err, failure) {
		t.Errorf("unknown: killed %v, %v", killed, err)
	}
	killed, err = killPinned(pid, func() (bool, error) { return true, nil })
	if !killed || err != nil {
		t.Errorf("the one meant: killed %v, %v", killed, err)
	}
	<-ended
	if killed, err := killPinned(pid, func() (bool, error) { t.Error("asked about no process"); return true, nil }); killed || err != nil {
		t.Errorf("gone: killed %v, %v", killed, err)
	}
}
