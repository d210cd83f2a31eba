package main_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ephemeral-run/ephemeral/node/guest"
)

// python makes a script of Python that runs to its end.
func python(text string) string { return "exec python3 - <<'END'\n" + text + "\nEND" }

// alive checks that an agent still works, that nothing is left of what ran, and that its memory is free again.
func (m *machine) alive() {
	m.t.Helper()
	if got := m.say("echo alive; ls -d /proc/[0-9]* | wc -l; cat /proc/[0-9]*/stat 2>/dev/null | grep -c ') Z '; true"); !strings.HasPrefix(got, "alive\n") || !strings.HasSuffix(got, "\n0") {
		m.t.Errorf("afterwards: %q", got)
	} else if n, err := strconv.Atoi(strings.Split(got, "\n")[1]); err != nil || n > 120 { // threads of the kernel, mostly
		m.t.Errorf("%s processes afterwards", strings.Split(got, "\n")[1])
	}
}

// testSessions: every command has a session and a cgroup of its own, at the same time and one after the other.
func (l *lab) testSessions(t *testing.T) {
	m, _ := l.prepared(t)
	const tell = `read -r _ _ _ _ _ session _ < /proc/$$/stat; echo $$ $session $(cut -d: -f3 /proc/self/cgroup)`
	var wg sync.WaitGroup
	out := make([]string, 3)
	for i := range out {
		wg.Go(func() { out[i], _, _ = m.run(tell + "; sleep 1") })
	}
	wg.Wait()
	sessions, groups := map[string]bool{}, map[string]bool{}
	for _, line := range out {
		f := strings.Fields(line)
		if len(f) != 3 || f[0] != f[1] || !strings.HasPrefix(f[2], "/commands/command-") {
			t.Fatalf("a command's process, session and cgroup: %q", line)
		}
		sessions[f[1]], groups[f[2]] = true, true
	}
	if len(sessions) != 3 || len(groups) != 3 {
		t.Errorf("commands share sessions or cgroups: %q", out)
	}
}

// testBombs: the agent answers while a command forks without end, and while it eats memory, and nobody else is killed.
func (l *lab) testBombs(t *testing.T) {
	m, _ := l.prepared(t)
	var wg sync.WaitGroup
	wg.Go(func() {
		m.run("bomb() { bomb | bomb & }; bomb; sleep 1000", func(c *guest.Command) { c.Timeout = 3 * time.Second })
	})
	time.Sleep(time.Second)
	if err := m.Ping(within(t, time.Minute)); err != nil {
		t.Errorf("during a fork bomb: %v", err)
	}
	wg.Wait()
	m.alive()
	bystander := make(chan guest.Exit, 1)
	go func() {
		_, _, exit := m.run("sleep 3")
		bystander <- exit
	}()
	stdout, _, exit := m.run(`echo before; python3 -c 'x = []
while True: x.append(bytearray(1 << 20))'; echo after $?`)
	if stdout != "before\nafter 137" || exit.Outcome != "exited" || exit.MemoryLimit <= 0 {
		t.Errorf("a shell whose child ate the memory: %q, %+v", stdout, exit)
	}
	if !strings.Contains(exit.Detail, strconv.FormatInt(exit.MemoryLimit, 10)) || !strings.Contains(exit.Detail, "out of memory") {
		t.Errorf("detail %q does not have the number", exit.Detail)
	}
	if exit := <-bystander; exit.Code != 0 {
		t.Errorf("another command was hit: %+v", exit)
	}
	m.alive()
}

// testSpace: a command that fills a file system fails in its own way, and its exit names the mount point, also when it
// has cleared up after itself.
func (l *lab) testSpace(t *testing.T) {
	m, _ := l.prepared(t)
	for dir, mount := range map[string]string{"/tmp": "/tmp", "/home/worker": "/", "/dev/shm": "/dev/shm"} {
		_, stderr, exit := m.run("head -c 1000000000 /dev/zero > " + dir + "/big")
		if exit.Code == 0 || !strings.Contains(stderr, "No space left on device") || !slices.Equal(exit.FullMounts, []string{mount}) {
			t.Errorf("%s: %+v, %q", dir, exit, stderr)
		}
		if _, _, exit := m.run("head -c 100000000 /dev/zero > " + dir + "/again; sleep 0.6; rm " + dir + "/big " + dir + "/again"); !slices.Contains(exit.FullMounts, mount) {
			t.Errorf("%s, cleared up: %+v", dir, exit)
		}
		if _, _, exit := m.run("echo x > " + dir + "/small"); exit.Code != 0 || exit.FullMounts != nil {
			t.Errorf("%s afterwards: %+v", dir, exit)
		}
	}
	m.alive()
}

// testManyFiles: 100,000 small files are there, or the file system said that it is full, and so does the exit.
func (l *lab) testManyFiles(t *testing.T) {
	m, _ := l.prepared(t)
	stdout, stderr, exit := m.run("mkdir /tmp/many; head -c 100000 /dev/zero | split -b 1 -a 4 - /tmp/many/f; ls -f /tmp/many | grep -c f")
	switch made, err := strconv.Atoi(stdout); {
	case err != nil || exit.Outcome != "exited":
		t.Fatalf("%q, %q, %+v", stdout, stderr, exit)
	case strings.Contains(stderr, "No space left on device"):
		if made < 10_000 || !slices.Equal(exit.FullMounts, []string{"/tmp"}) {
			t.Errorf("full after %d files: %+v", made, exit)
		}
	case made != 100_000 || exit.FullMounts != nil:
		t.Errorf("%d files, %q, %+v", made, stderr, exit)
	}
	t.Logf("%s files, full mounts %v", stdout, exit.FullMounts)
	m.say("rm -r /tmp/many; echo x > /tmp/small")
	m.alive()
}

// testFlood: output beyond the limit is counted, not carried, and holds up neither the agent nor its memory.
func (l *lab) testFlood(t *testing.T) {
	m, _ := l.prepared(t)
	const size = 20_000_000
	rss := func() int {
		n, _ := strconv.Atoi(strings.Fields(m.say("grep VmRSS /proc/1/status"))[1])
		return n
	}
	before := rss()
	var out, errs bytes.Buffer
	exit, err := m.Exec(within(t, 2*time.Minute), guest.Command{
		Args:        []string{"sh", "-c", fmt.Sprintf("yes | head -c %d; yes 'häß' | head -c %d >&2", size, size)},
		OutputLimit: 100_000,
	}, &out, &errs)
	if err != nil || exit.Code != 0 || exit.StdoutBytes != size || exit.StderrBytes != size || !exit.StdoutTruncated || !exit.StderrTruncated {
		t.Errorf("%+v, %v", exit, err)
	}
	if out.Len() != 100_000 || errs.Len() > 100_000 || errs.Len() < 99_990 || strings.Count(errs.String(), "häß\n") != errs.Len()/6 {
		t.Errorf("%d and %d bytes came", out.Len(), errs.Len())
	}
	if after := rss(); after > before+32<<10 {
		t.Errorf("the agent has grown from %d to %d KiB", before, after)
	}
	m.alive()
}

// testLines: a line of 5 MiB, bytes of every value, input that is not read, and a child that keeps the output open.
func (l *lab) testLines(t *testing.T) {
	m, _ := l.prepared(t)
	line := bytes.Repeat([]byte("0123456789abcde\xff"), 5<<20/16)
	for i := range line {
		if i%4096 < 256 && byte(i) != '\n' {
			line[i] = byte(i)
		}
	}
	var out bytes.Buffer
	exit, err := m.Exec(within(t, 2*time.Minute), guest.Command{Args: []string{"cat"}, Stdin: bytes.NewReader(line)}, &out, nil)
	if sum := sha256.Sum256(out.Bytes()); err != nil || exit.Code != 0 || hex.EncodeToString(sum[:]) != hex.EncodeToString(sha256Of(line)) {
		t.Errorf("a line of %d bytes came back with %d: %+v, %v", len(line), out.Len(), exit, err)
	}
	if got, _, exit := m.run("wc -c", func(c *guest.Command) { c.Stdin = bytes.NewReader(make([]byte, 20<<20)) }); got != strconv.Itoa(20<<20) || exit.Code != 0 {
		t.Errorf("20 MiB of input: %q, %+v", got, exit)
	}
	if _, _, exit := m.run("head -c 10 >/dev/null; exec 0<&-; sleep 0.2; exit 5", func(c *guest.Command) { c.Stdin = bytes.NewReader(make([]byte, 5<<20)) }); exit.Outcome != "exited" || exit.Code != 5 || !strings.Contains(exit.Detail, "standard input") {
		t.Errorf("closed input: %+v", exit)
	}
	if got, _, exit := m.run(`(sleep 1000; echo late) & (setsid sh -c 'while :; do sleep 0.01; echo more >/dev/null; done' &); printf 'done'`); got != "done" || exit.Code != 0 {
		t.Errorf("background children: %q, %+v", got, exit)
	}
	m.alive()
}

func sha256Of(b []byte) []byte {
	sum := sha256.Sum256(b)
	return sum[:]
}

// testZombies: thousands of orphans that end at once are reaped, and no exit code of a command is lost over them.
func (l *lab) testZombies(t *testing.T) {
	m, _ := l.prepared(t)
	stdout, _, exit := m.run(`i=0; while [ $i -lt 1500 ]; do ( (exit 7) & ); i=$((i + 1)); done; echo made; exit 42`)
	if stdout != "made" || exit.Outcome != "exited" || exit.Code != 42 {
		t.Errorf("%q, %+v", stdout, exit)
	}
	m.alive()
}

// testShortProcesses: 5,000 processes have the exit codes that they ended with.
func (l *lab) testShortProcesses(t *testing.T) {
	m, _ := l.prepared(t)
	got := m.say(`bad=0 i=0; while [ $i -lt 5000 ]; do (exit $((i % 256))); [ $? = $((i % 256)) ] || bad=$((bad + 1)); i=$((i + 1)); done; echo $bad`)
	if got != "0" {
		t.Errorf("%s of 5,000 exit codes were wrong", got)
	}
	var wg sync.WaitGroup
	for k := range 4 {
		wg.Go(func() {
			for i := range 15 {
				want := (k*15 + i) % 256
				if _, _, exit := m.run(fmt.Sprintf("exit %d", want)); exit.Code != want || exit.Outcome != "exited" {
					t.Errorf("exit %d: %+v", want, exit)
				}
			}
		})
	}
	wg.Wait()
	m.alive()
}

// testLimits: what a command may use at most, and that it sees it.
func (l *lab) testLimits(t *testing.T) {
	m, _ := l.prepared(t)
	if got := m.say("nproc; ulimit -n; bash -c 'ulimit -u'; ulimit -c; cat /sys/fs/cgroup$(cut -d: -f3 /proc/self/cgroup)/pids.max"); got != "1\n65536\n4096\n0\n2048" {
		t.Errorf("limits %q", got)
	}
	total, err := strconv.Atoi(m.say("free -m | awk '/^Mem:/ {print $2}'"))
	if err != nil || total > memoryMiB || total < memoryMiB*3/4 {
		t.Errorf("free tells of %d MiB, the machine has %d, %v", total, memoryMiB, err)
	}
	limit, err := strconv.ParseInt(m.say("cat /sys/fs/cgroup$(cut -d: -f3 /proc/self/cgroup)/memory.max"), 10, 64)
	if err != nil || limit >= int64(total)<<20 || limit < int64(total)<<20/2 {
		t.Errorf("commands may use %d bytes of %d MiB, %v", limit, total, err)
	}
	got := m.say(python("import os\nn = 0\ntry:\n    while n < 100_000: os.dup(0); n += 1\nexcept OSError as e:\n    print(e.errno, n < 65_536)"))
	if got != "24 True" {
		t.Errorf("open files: %q", got)
	}
	m.alive()
}

// testDeadAgent: when the kernel dies under the agent, a command that runs is lost, never a success, and the machine ends.
func (l *lab) testDeadAgent(t *testing.T) {
	m, client := l.clone(t)
	if _, err := client.Prepare(within(t, time.Minute), guest.Identity{Hostname: "dead", MachineID: strings.Repeat("d", 32)}); err != nil {
		t.Fatal(err)
	}
	// The kernel lets nobody kill or stop its first process, root neither.
	var out bytes.Buffer
	if _, err := client.Exec(within(t, time.Minute), guest.Command{User: "root", Args: []string{"sh", "-c", "kill -9 1; kill -STOP 1; echo tried"}}, &out, nil); err != nil || out.String() != "tried\n" {
		t.Errorf("%q, %v", out.String(), err)
	}
	if err := client.Ping(within(t, time.Minute)); err != nil {
		t.Errorf("after signals to the agent: %v", err)
	}
	out.Reset()
	exit, err := client.Exec(within(t, time.Minute), guest.Command{User: "root", Args: []string{"sh", "-c", "echo begun; sleep 0.3; echo c > /proc/sysrq-trigger; sleep 1000"}}, &out, nil)
	if !errors.Is(err, guest.ErrLost) || exit.Outcome != "" {
		t.Errorf("%+v, %v", exit, err)
	}
	if out.String() != "begun\n" {
		t.Errorf("what was written before: %q", out.String())
	}
	select {
	case <-m.Done():
	case <-within(t, time.Minute).Done():
		t.Error("the machine is on")
	}
}
