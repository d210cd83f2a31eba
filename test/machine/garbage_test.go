package machine

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"runtime"
	"testing"
	"time"

	"github.com/ephemeral-run/ephemeral/guestagent/proto"
)

// TestGarbageOnTheLine: a guest that took the agent's place writes random bytes on the machine's one connection to the host,
// without end. What was open over it breaks, every new attempt comes to an end, the host holds none of the bytes, and the
// machine ends like any other.
func TestGarbageOnTheLine(t *testing.T) {
	t.Parallel()
	other := commonHost(t).start(t)
	m := bootDialer(t)
	ctx, cancel := context.WithTimeout(t.Context(), createLimit)
	defer cancel()
	idle, err := m.Dial(ctx, proto.AgentPort)
	if err != nil {
		t.Fatal(err)
	}
	defer idle.Close()
	if err := idle.SetDeadline(time.Now().Add(commandLimit)); err != nil {
		t.Fatal(err)
	}
	if _, err := idle.Write([]byte("[]\n")); err != nil {
		t.Fatal(err)
	}
	var nothing map[uint32]string
	if err := json.NewDecoder(idle).Decode(&nothing); err != nil {
		t.Fatal(err)
	}
	before := heap()
	if n, err := io.Copy(io.Discard, idle); errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("after %d bytes the connection has not ended", n)
	}
	for range 3 {
		attempt, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		began := time.Now()
		c, err := m.Dial(attempt, proto.AgentPort)
		if took := time.Since(began); took > 20*time.Second {
			t.Errorf("an attempt of 2 s took %s: %v", took, err)
		}
		if err == nil {
			_ = c.SetDeadline(time.Now().Add(2 * time.Second))
			if err := json.NewEncoder(c).Encode([]uint32{1}); err == nil {
				err = json.NewDecoder(c).Decode(&nothing)
				t.Logf("an answer in spite of the garbage: %v, %v", nothing, err)
			}
			_ = c.Close()
		} else {
			t.Logf("after %s: %v", time.Since(began).Round(time.Millisecond), err)
		}
		cancel()
	}
	if grown := heap() - before; grown > 64<<20 {
		t.Errorf("the host holds %d MiB more", grown>>20)
	}
	other.must(t, shell("worker", "true"))
	if err := m.Close(); err != nil {
		t.Error(err)
	}
}

// heap is what this process holds, in bytes, without garbage.
func heap() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}
