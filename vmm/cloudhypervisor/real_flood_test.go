package cloudhypervisor_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ephemeral-run/ephemeral/guestagent/proto"
	"github.com/ephemeral-run/ephemeral/vmm"
	"github.com/ephemeral-run/ephemeral/vmm/vmmtest"
)

// flood opens connections to the host for ten seconds, to a port with a listener and to ports without, keeps up to 2000 of
// them, writes garbage to each, and says how many it made. It is root's, who may raise its limit of open files.
const flood = `
import errno, os, resource, socket, time
resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
garbage, kept, made, refused = os.urandom(4096), [], 0, 0
end = time.monotonic() + 10
while time.monotonic() < end:
    s = socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)
    s.setblocking(False)
    try:
        s.connect((2, PORT if made % 4 else 4242 + made % 1000))
    except BlockingIOError:
        pass
    except OSError:
        refused += 1
    made += 1
    kept.append(s)
    for one in kept[-8:]:
        try:
            one.send(garbage)
        except OSError:
            pass
    if len(kept) == 2000:
        for one in kept[:1000]:
            one.close()
        del kept[:1000]
print(made, refused)
`

// most is how many of a machine's connections the host's side keeps, as the broker does.
const most = 128

// hoard accepts connections and keeps the first ones, silent. Those beyond most it closes. The returned function ends it and
// tells how many came.
func hoard(ln net.Listener) (stop func() int) {
	var all sync.WaitGroup
	var kept []net.Conn
	came := 0
	all.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			if came++; len(kept) < most {
				kept = append(kept, c)
			} else {
				_ = c.Close()
			}
		}
	})
	return func() int {
		_ = ln.Close()
		all.Wait()
		for _, c := range kept {
			_ = c.Close()
		}
		return came
	}
}

// openFiles counts the descriptors of a process.
func openFiles(t *testing.T, pid int) int {
	t.Helper()
	all, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	if err != nil {
		t.Fatal(err)
	}
	return len(all)
}

// TestRealVsockFlood: connections and garbage without end on a machine's vsock cost a neighbour nothing but time, and the host
// no more than bounded descriptors and memory, and nothing afterwards.
func TestRealVsockFlood(t *testing.T) {
	h := vmmtest.Harness{Driver: realDriver(t), Image: vmmtest.Image(t), Slow: slow(t), Shape: vmm.Shape{VCPUs: 1, MemoryMiB: 256}}
	tpl := h.MakeTemplate(t, t.TempDir())
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	hostile, neighbour := h.Clone(t, tpl), h.Clone(t, tpl)
	beside := vmmtest.NewAgent(neighbour.Dial)
	ln, err := hostile.Listen(proto.BrokerPort)
	if err != nil {
		t.Fatal(err)
	}
	stop := hoard(ln)
	stats, err := hostile.Stats()
	if err != nil {
		t.Fatal(err)
	}
	oursBefore, itsBefore := openFiles(t, os.Getpid()), openFiles(t, stats.Pid)

	var said bytes.Buffer
	done := make(chan error, 1)
	go func() {
		script := strings.ReplaceAll(flood, "PORT", fmt.Sprint(proto.BrokerPort))
		done <- vmmtest.NewAgent(hostile.Dial).Run(ctx, nil, &said, "python3", "-c", script)
	}()
	calls, oursMost, itsMost := 0, 0, 0
	var longest time.Duration
	for flooding := true; flooding; {
		began := time.Now()
		if err := beside.Run(ctx, nil, io.Discard, "true"); err != nil {
			t.Fatalf("the neighbour: %v", err)
		}
		calls, longest = calls+1, max(longest, time.Since(began))
		oursMost, itsMost = max(oursMost, openFiles(t, os.Getpid())), max(itsMost, openFiles(t, stats.Pid))
		select {
		case err := <-done:
			if err != nil {
				t.Logf("the flood cost its own machine the command: %v", err)
			}
			flooding = false
		default:
		}
	}
	came := stop()
	t.Logf("the guest made and was refused at once: %s; %d connections came; the neighbour ran %d commands, the slowest in %v",
		bytes.TrimSpace(said.Bytes()), came, calls, longest.Round(time.Millisecond))
	t.Logf("open files: ours %d, %d at most; the hypervisor's %d, %d at most", oursBefore, oursMost, itsBefore, itsMost)
	if came < most {
		t.Errorf("that was no flood: %d connections", came)
	}
	if oursMost > oursBefore+2*most {
		t.Errorf("this process had %d files open, %d before", oursMost, oursBefore)
	}
	if itsMost > itsBefore+1200 { // it keeps 1023 connections at the most
		t.Errorf("the hypervisor had %d files open, %d before", itsMost, itsBefore)
	}
	if after, err := hostile.Stats(); err != nil {
		t.Error(err)
	} else if grown := after.PrivateBytes - stats.PrivateBytes; grown > 320<<20 {
		t.Errorf("the hypervisor grew by %d MiB", grown>>20)
	}
	if err := hostile.Close(); err != nil {
		t.Error(err)
	}
	if after := openFiles(t, os.Getpid()); after > oursBefore {
		t.Errorf("%d files are open, %d were before", after, oursBefore)
	}
	if err := beside.Run(ctx, nil, io.Discard, "true"); err != nil {
		t.Errorf("the neighbour afterwards: %v", err)
	}
}
