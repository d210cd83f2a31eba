package machine

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ephemeral-run/ephemeral/node/guest"
)

// atOnce bounds how many machines a test makes at the same time: an emulated one uses a whole processor.
const atOnce = 3

// traitScript tells what must differ between machines: what programs take randomness from, and names and addresses.
const traitScript = `
import json, os, random, secrets, subprocess, sys, tempfile, uuid

def read(path):
    with open(path) as f:
        return f.read().strip()

def output(*args):
    return subprocess.run(args, check=True, capture_output=True, text=True).stdout.strip()

maps = read("/proc/self/maps").splitlines()
traits = {
    "kernel uuid": read("/proc/sys/kernel/random/uuid"),
    "boot id": read("/proc/sys/kernel/random/boot_id"),
    "os.urandom": os.urandom(16).hex(),
    "/dev/urandom": open("/dev/urandom", "rb", 0).read(16).hex(),
    "/dev/random": open("/dev/random", "rb", 0).read(16).hex(),
    "random.random": str(random.random()),
    "random.random of another": output("python3", "-c", "import random; print(random.random())"),
    "hash of a string": output("python3", "-c", "print(hash('ephemeral'))"),
    "secrets": secrets.token_hex(),
    "uuid4": str(uuid.uuid4()),
    "memory layout": maps[0].split("-")[0] + next(m.split("-")[0] for m in maps if m.endswith("[stack]")),
    "temporary name": output("mktemp", "-u"),
    "bash SRANDOM": output("bash", "-c", "echo $SRANDOM $SRANDOM"),
    "hostname": output("hostname") if os.path.exists("/usr/bin/hostname") else os.uname().nodename,
    "/etc/hostname": read("/etc/hostname"),
    "machine id": read("/etc/machine-id"),
    "MAC address": read("/sys/class/net/eth0/address"),
    "address": [l for l in read("/proc/net/fib_trie").splitlines() if "-- 10." in l][0].split()[-1],
    "scratch": os.getcwd(),
}
if os.path.exists("/usr/bin/openssl"):
    traits["openssl"] = output("openssl", "rand", "-hex", "16")
json.dump(traits, sys.stdout)
`

// traits are read as the worker, which is who must not be able to tell the future of another.
func (m *machine) traits(ctx context.Context) (map[string]string, error) {
	out, err := m.ask(ctx, script("worker", traitScript, nil))
	if err != nil {
		return nil, err
	}
	got := make(map[string]string)
	if err := json.Unmarshal([]byte(out), &got); err != nil {
		return nil, fmt.Errorf("traits: %w: %.200s", err, out)
	}
	for name, want := range map[string]string{
		"hostname": m.identity.Hostname, "/etc/hostname": m.identity.Hostname, "machine id": m.identity.MachineID,
		"MAC address": m.identity.MAC, "address": strings.TrimSuffix(m.identity.Address, "/32"), "scratch": m.prepared.Scratch,
	} {
		if got[name] != want {
			return nil, fmt.Errorf("%s is %q, want %q", name, got[name], want)
		}
	}
	return got, nil
}

// drawScript draws 64 times 8 bytes. What clones share may be shifted by a draw more or less, hence so many.
const drawScript = `import os; print(*(os.urandom(8).hex() for _ in range(64)))`

func (m *machine) draws(ctx context.Context) ([]string, error) {
	c := script("worker", drawScript, nil)
	c.Warming, c.Cwd = true, "/"
	out, err := m.ask(ctx, c)
	if err != nil {
		return nil, err
	}
	draws := strings.Fields(out)
	if len(draws) != 64 {
		return nil, fmt.Errorf("%d draws: %.100s", len(draws), out)
	}
	return draws, nil
}

// clockScript answers each line with the time.
const clockScript = `
import sys, time
for _ in sys.stdin:
    print(time.time_ns())
`

// clock is how far the guest's clock is ahead of the host's, as a program in the machine sees it, and the round trip that
// it was measured by: half of it is the error at the most.
func (m *machine) clock(ctx context.Context) (ahead, roundTrip time.Duration, err error) {
	ctx, cancel := context.WithTimeout(ctx, commandLimit)
	defer cancel()
	in, input := io.Pipe()
	output, out := io.Pipe()
	ended := make(chan error, 1)
	go func() {
		c := script("worker", clockScript, in)
		c.Warming, c.Cwd = true, "/"
		_, err := m.guest.Exec(ctx, c, out, nil)
		_ = out.CloseWithError(errors.Join(err, io.EOF))
		_ = in.CloseWithError(io.ErrClosedPipe)
		ended <- err
	}()
	lines := bufio.NewReader(output)
	roundTrip = time.Hour
	for tries := 0; tries < 200 && (tries < 5 || roundTrip > 15*time.Millisecond); tries++ {
		sent := time.Now()
		if _, err = input.Write([]byte("\n")); err != nil {
			break
		}
		var line string
		if line, err = lines.ReadString('\n'); err != nil {
			break
		}
		took := time.Since(sent)
		var now int64
		if now, err = strconv.ParseInt(strings.TrimSpace(line), 10, 64); err != nil {
			break
		}
		if took < roundTrip {
			ahead, roundTrip = time.Unix(0, now).Sub(sent.Add(took/2)), took
		}
	}
	_ = input.Close()
	return ahead, roundTrip, errors.Join(err, <-ended)
}

// checkClock compares the clocks. On a host so busy that no round trip is short, what the long one cannot tell is allowed.
func (m *machine) checkClock(ctx context.Context) error {
	ahead, roundTrip, err := m.clock(ctx)
	if err != nil {
		return fmt.Errorf("measure the clock: %w", err)
	}
	allowed := guest.MaxClockError
	if roundTrip > 20*time.Millisecond {
		allowed += roundTrip / 2
	}
	if ahead.Abs() > allowed {
		return fmt.Errorf("the guest's clock is %v ahead of the host's, measured by a round trip of %v", ahead, roundTrip)
	}
	return nil
}

// clones makes n machines, a few at a time, and calls do for each.
func (h *host) clones(t *testing.T, n int, do func(i int, m *machine) error) {
	t.Helper()
	var wg sync.WaitGroup
	slots := make(chan struct{}, atOnce)
	for i := range n {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			m, err := h.clone(t.Context())
			if err == nil {
				err = errors.Join(do(i, m), m.Close())
			}
			if err != nil {
				t.Errorf("clone %d: %v", i, err)
			}
		})
	}
	wg.Wait()
}

// differ checks that no two machines have the same value of any trait.
func differ(t *testing.T, all []map[string]string) {
	t.Helper()
	for _, name := range names(all) {
		seen := make(map[string]int)
		for i, traits := range all {
			if traits == nil {
				continue
			}
			value := traits[name]
			if other, taken := seen[value]; taken || value == "" {
				t.Errorf("machines %d and %d have the same %s: %q", other, i, name, value)
			}
			seen[value] = i
		}
	}
}

func names(all []map[string]string) (names []string) {
	for _, traits := range all {
		for name := range traits {
			if !slices.Contains(names, name) {
				names = append(names, name)
			}
		}
	}
	slices.Sort(names)
	return names
}

// shared is how many values occur in more than one machine's draws.
func shared(all [][]string) int {
	owner, common := make(map[string]int), make(map[string]bool)
	for i, draws := range all {
		for _, d := range draws {
			if other, taken := owner[d]; taken && other != i {
				common[d] = true
			}
			owner[d] = i
		}
	}
	return len(common)
}

// TestClonesDiffer: machines of one template have nothing in common that should be an individual's own.
func TestClonesDiffer(t *testing.T) {
	t.Parallel()
	h := commonHost(t)
	for _, n := range []int{2, 20} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			traits, draws := make([]map[string]string, n), make([][]string, n)
			h.clones(t, n, func(i int, m *machine) (err error) {
				if err = m.prepare(t.Context()); err != nil {
					return err
				}
				if traits[i], err = m.traits(t.Context()); err != nil {
					return err
				}
				if draws[i], err = m.draws(t.Context()); err != nil {
					return err
				}
				return m.checkClock(t.Context())
			})
			differ(t, traits)
			if n := shared(draws); n != 0 {
				t.Errorf("%d random values occur in more than one machine", n)
			}
			t.Logf("compared: %q", names(traits))
		})
	}
}
