package e2e

import (
	"slices"
	"testing"

	"github.com/ephemeral-run/ephemeral/client"
	"github.com/ephemeral-run/ephemeral/run"
)

// TestEventsTellOfMemoryAndSpace: the event of a command that ran out of memory has the number, that of one that filled a
// file system the mount point.
func TestEventsTellOfMemoryAndSpace(t *testing.T) {
	t.Parallel()
	n := shared.tenant(t, 1_000_000)
	r := n.finish(t, client.Request{Command: `python3 -c 'x = []
while True: x.append(bytearray(1 << 20))'
head -c 2000000000 /dev/zero > /dev/shm/big
exit 9`})
	if r.State != run.Succeeded || r.Result == nil || r.Result.ExitCode == nil || *r.Result.ExitCode != 9 {
		t.Fatalf("ended %s, error %+v, result %+v", r.State, r.Error, r.Result)
	}
	for _, e := range n.events(t, r.ID) {
		if d, ok := e.Data.(run.ShellData); ok {
			if d.Outcome != "out_of_memory" || d.MemoryLimit < 100<<20 || !slices.Contains(d.FullMounts, "/dev/shm") {
				t.Errorf("shell event %+v", d)
			}
			return
		}
	}
	t.Error("no shell event")
}
