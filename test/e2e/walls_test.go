package e2e

import (
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ephemeral-run/ephemeral/client"
	"github.com/ephemeral-run/ephemeral/run"
)

// individual has a machine tell what must not be as in any other, its clock, and what it cannot reach. Every image has what
// it needs: a shell, coreutils and bash.
const individual = `cat /proc/sys/kernel/random/uuid /proc/sys/kernel/random/boot_id /etc/machine-id /sys/class/net/eth0/address
hostname
pwd
head -c 16 /dev/urandom | od -An -tx1
date +%s.%N
for address in tcp/169.254.169.254/80 tcp/1.1.1.1/443 tcp/10.0.0.1/22; do
	timeout 4 bash -c "exec 3<>/dev/$address" 2>/dev/null && echo "reached $address"
done
bash -c 'echo x > /dev/udp/1.1.1.1/53'
getent hosts example.com && echo "resolved"
printf 'a\303\0b' >&2`

// walls checks what every image and both rests of the pool have to keep: machines that are individuals with the right time,
// nothing that gets out, exact bytes, no process that outlives its limit, nothing that is left.
func walls(t *testing.T, n *tenant, image string) {
	t.Helper()
	var runs [2]run.Run
	var all sync.WaitGroup
	for i := range runs {
		all.Go(func() { runs[i] = n.finish(t, client.Request{Command: individual, Image: image}) })
	}
	slow := n.finish(t, client.Request{Command: "setsid sleep 1000 & sleep 1000", TimeoutSeconds: 2, Image: image})
	all.Wait()
	if slow.State != run.TimedOut {
		t.Errorf("a run without an end ended %s, %+v", slow.State, slow.Error)
	}
	seen := map[string]bool{}
	for _, r := range runs {
		if r.State != run.Succeeded || r.Result == nil {
			t.Fatalf("ended %s, %+v", r.State, r.Error)
		}
		lines := strings.Split(strings.TrimSpace(r.Result.Stdout.Content), "\n")
		if len(lines) != 8 {
			t.Fatalf("%d lines, want 8: something was reached, or is missing:\n%s", len(lines), r.Result.Stdout.Content)
		}
		for _, id := range lines[:7] {
			if seen[id] || len(id) < 8 {
				t.Errorf("both machines have %q", id)
			}
			seen[id] = true
		}
		var clock float64
		if _, err := fmt.Sscan(lines[7], &clock); err != nil {
			t.Fatal(err)
		}
		at, slack := time.Unix(0, int64(clock*1e9)), 50*time.Millisecond
		if at.Before(r.StartedAt.Add(-slack)) || at.After(r.EndedAt.Add(slack)) {
			t.Errorf("it was %s in a machine that worked from %s to %s", at, r.StartedAt, r.EndedAt)
		}
		if got := r.Result.Stderr; got.Encoding != "base64" || got.Content != "YcMAYg==" {
			t.Errorf("standard error is %+v", got)
		}
		if r.Egress.DroppedPackets == 0 {
			t.Error("no packet was dropped, though the machine tried")
		}
	}
	for _, r := range append(runs[:], slow) {
		if r.Machine == "" {
			t.Errorf("%s had no machine", r.ID)
		} else if left := n.server.leftOf(t, r.Machine); len(left) > 0 {
			t.Errorf("left of machine %s: %v", r.Machine, left)
		}
		checkMoney(t, r, r.Money.Reserved)
	}
}

// TestWallsWhileResting has machines that rest running until they are claimed, on a server that is killed and started again
// in the end; those of the other tests rest paused.
func TestWallsWhileResting(t *testing.T) {
	s := startOwn(t, "EPHEMERAL_POOL_REST=running", "EPHEMERAL_POOL_MIN_READY=2", "EPHEMERAL_POOL_MAX_READY=2", "EPHEMERAL_POOL_MAX_MACHINES=3")
	n := s.tenant(t, 1_000_000)
	walls(t, n, "")
	s.kill()
	if err := s.launch(); err != nil {
		t.Fatal(err)
	}
	if r := n.finish(t, client.Request{Command: "true"}); r.State != run.Succeeded {
		t.Errorf("after a kill: %s, %+v", r.State, r.Error)
	}
}

func TestWalls(t *testing.T) {
	t.Parallel()
	walls(t, shared.tenant(t, 1_000_000), "")
}
