package machine

import (
	"context"
	"strconv"
	"testing"
	"time"
)

// resets takes devices from their drivers and gives them back for a few seconds, which resets them each time, and says how
// often. It leaves out those that it needs itself.
const resets = `cd /sys/bus/virtio/drivers
n=0 end=$(( $(date +%s) + 6 ))
while [ $(date +%s) -lt $end ]; do
	for device in */virtio*; do
		driver=${device%/*} id=${device#*/}
		case $driver in *blk*|*console*) continue;; esac
		echo $id > $driver/unbind && echo $id > $driver/bind && n=$((n + 1))
	done
done
echo $n`

// lastReset takes the machine's disk and its line to the host.
const lastReset = `cd /sys/bus/virtio/drivers; for device in *blk*/virtio* *console*/virtio*; do echo ${device#*/} > ${device%/*}/unbind; done`

// TestVirtioResets has the root of a guest reset its devices all the time: that costs the host nothing that stays, and its
// neighbour's commands go on. At last it resets those that it lives by: the machine ends like any other.
func TestVirtioResets(t *testing.T) {
	t.Parallel()
	h := commonHost(t)
	hostile, other := h.start(t), h.start(t)
	before, err := hostile.Stats()
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	beside := make(chan time.Duration, 1)
	go func() {
		var worst time.Duration
		for ctx.Err() == nil {
			began := time.Now()
			if _, err := other.ask(t.Context(), shell("worker", "true")); err != nil {
				t.Errorf("a neighbour's command: %v", err)
			}
			worst = max(worst, time.Since(began))
			time.Sleep(50 * time.Millisecond)
		}
		beside <- worst
	}()
	told := hostile.must(t, shell("root", resets))
	stop()
	worst := <-beside
	n, err := strconv.Atoi(told)
	if err != nil || n < 4 {
		t.Errorf("%q resets", told)
	}
	after, err := hostile.Stats()
	if err != nil {
		t.Fatal(err)
	}
	grown := (after.PrivateBytes - before.PrivateBytes) >> 20
	t.Logf("%d resets: the machine's process grew by %d MiB; a neighbour's command took %s at most", n, grown, worst.Round(time.Millisecond))
	if grown > memoryMiB { // what the guest touches of its own memory meanwhile, and no more
		t.Errorf("the machine's process grew by %d MiB", grown)
	}
	last, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	if _, err := hostile.ask(last, shell("root", lastReset)); err == nil {
		t.Log("the machine outlived the reset of its line")
	}
	if err := hostile.Close(); err != nil {
		t.Error(err)
	}
	other.must(t, shell("worker", "true"))
}
