package exec

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
)

var testReaper *Reaper

func TestMain(m *testing.M) {
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil { // inherit orphans, as PID 1 does
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	if err := unix.CloseRange(3, 1<<20, unix.CLOSE_RANGE_CLOEXEC); err != nil { // what whoever runs the test left open
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	testReaper = NewReaper()
	code := m.Run()
	testReaper.Close()
	if err := goleak.Find(); err != nil && code == 0 {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

// hierarchy finds where version 2 cgroups are mounted, beside version 1 on some hosts.
func hierarchy(t testing.TB) string {
	for _, dir := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/unified"} {
		if _, err := os.Stat(filepath.Join(dir, "cgroup.procs")); err == nil {
			if _, err := os.Stat(filepath.Join(dir, "cgroup.controllers")); err == nil {
				return dir
			}
		}
	}
	t.Fatal("no version 2 cgroup hierarchy is mounted")
	return ""
}

func newRunner(t testing.TB) *Runner {
	t.Helper()
	parent := filepath.Join(hierarchy(t), fmt.Sprintf("ephemeral-test-%d-%d", os.Getpid(), time.Now().UnixNano()))
	if err := os.Mkdir(parent, 0o755); err != nil {
		t.Fatal(err)
	}
	r, err := New(Config{Cgroup: filepath.Join(parent, "commands"), OOMScoreAgent: "0", OOMScoreCommand: "500"}, testReaper)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.Close(); err != nil {
			t.Error(err)
		}
		if err := os.Remove(parent); err != nil {
			t.Error(err)
		}
	})
	return r
}

type captured struct {
	mu  sync.Mutex
	out [2]bytes.Buffer
}

func (c *captured) sink(s Stream, p []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.out[s].Write(p)
}

func (c *captured) stdout() string { return c.out[Stdout].String() }

func spec(t testing.TB, c *captured, args ...string) Spec {
	return Spec{Args: args, Env: []string{"PATH=/usr/bin:/bin", "LANG=C.UTF-8"}, Dir: "/tmp",
		User: User{UID: 65534, GID: 65534, Groups: []uint32{65534, 100}}, Output: c.sink}
}

func shell(t testing.TB, c *captured, script string) Spec { return spec(t, c, "/bin/sh", "-c", script) }

func run(t testing.TB, r *Runner, s Spec) Result {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	result, err := r.Run(ctx, s)
	if err != nil {
		t.Fatal(err)
	}
	return result
}

func TestOutcomes(t *testing.T) {
	r := newRunner(t)
	dir, err := os.MkdirTemp("", "exec") // not below one that only root may enter
	if err == nil {
		err = os.Chmod(dir, 0o755)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	write := func(name, content string, mode os.FileMode) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(content), mode); err != nil {
			t.Fatal(err)
		}
		return path
	}
	for _, c := range []struct {
		name    string
		change  func(*Spec)
		args    []string
		outcome string
		code    int
		detail  string
	}{
		{name: "success", args: []string{"true"}, outcome: Exited},
		{name: "failure", args: []string{"sh", "-c", "exit 42"}, outcome: Exited, code: 42},
		{name: "signal", args: []string{"sh", "-c", "kill -TERM $$"}, outcome: Signalled, code: 143, detail: "terminated"},
		{name: "killed by itself", args: []string{"sh", "-c", "kill -KILL $$"}, outcome: Signalled, code: 137, detail: "killed"},
		{name: "timeout", args: []string{"sleep", "60"}, change: func(s *Spec) { s.Timeout = 50 * time.Millisecond }, outcome: TimedOut, code: 137},
		{name: "no command", args: []string{"no-such-command"}, outcome: NotFound, code: 127, detail: `command "no-such-command": no such file or directory`},
		{name: "empty", args: []string{""}, outcome: NotFound, code: 127, detail: "no command"},
		{name: "nothing", outcome: NotFound, code: 127, detail: "no command"},
		{name: "no path", args: []string{"/no/such"}, outcome: NotFound, code: 127},
		{name: "directory", args: []string{"/tmp"}, outcome: NotFound, code: 126, detail: `command "/tmp": is a directory`},
		{name: "not executable", args: []string{write("plain", "x", 0o644)}, outcome: NotFound, code: 126},
		{name: "no format", args: []string{write("text", "echo hi\n", 0o755)}, outcome: NotFound, code: 126},
		{name: "no interpreter", args: []string{write("script", "#!/no/such\n", 0o755)}, outcome: NotFound, code: 127},
		{name: "no directory", args: []string{"true"}, change: func(s *Spec) { s.Dir = "/no/such" }, outcome: NotFound, code: 127, detail: `working directory "/no/such": no such file or directory`},
		{name: "file as directory", args: []string{"true"}, change: func(s *Spec) { s.Dir = "/etc/passwd" }, outcome: NotFound, code: 127, detail: `working directory "/etc/passwd": not a directory`},
		{name: "relative directory", args: []string{"true"}, change: func(s *Spec) { s.Dir = "a" }, outcome: NotFound, code: 127},
		{name: "unreadable directory", args: []string{"true"}, change: func(s *Spec) { s.Dir = "/root" }, outcome: NotFound, code: 126},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := spec(t, &captured{}, c.args...)
			if c.change != nil {
				c.change(&s)
			}
			got := run(t, r, s)
			if got.Outcome != c.outcome || got.Code != c.code || c.detail != "" && got.Detail != c.detail {
				t.Errorf("got %s %d %q, want %s %d %q", got.Outcome, got.Code, got.Detail, c.outcome, c.code, c.detail)
			}
		})
	}
}

func TestExactBytes(t *testing.T) {
	r := newRunner(t)
	var c captured
	got := run(t, r, shell(t, &c, `printf 'a\n\n\nb'; printf 'x\000\377\303' >&2`))
	if c.stdout() != "a\n\n\nb" || c.out[Stderr].String() != "x\x00\xff\xc3" {
		t.Errorf("got %q and %q", c.stdout(), c.out[Stderr].String())
	}
	if got.Stdout != (Volume{Bytes: 5}) || got.Stderr != (Volume{Bytes: 4}) {
		t.Errorf("got %+v", got)
	}
}

func TestLargeOutputKeepsCharactersWhole(t *testing.T) {
	r := newRunner(t)
	var c captured
	s := shell(t, &c, `head -c 3000000 /dev/zero | tr '\0' 'x' | sed 's/x/€/g'`)
	whole := true
	s.Output = func(st Stream, p []byte) {
		whole = whole && Whole(p) == len(p) && len(p) <= ChunkSize
		c.sink(st, p)
	}
	got := run(t, r, s)
	if want := strings.Repeat("€", 3_000_000); c.stdout() != want || !whole {
		t.Errorf("%d bytes, characters whole: %v", len(c.stdout()), whole)
	}
	if got.Stdout.Bytes != 9_000_000 || got.Stdout.Truncated {
		t.Errorf("got %+v", got.Stdout)
	}
}

func TestLimitCountsAndDrops(t *testing.T) {
	r := newRunner(t)
	for _, c := range []struct {
		limit int64
		want  string
	}{{5, "€"}, {6, "€€"}, {7, "€€"}, {9, "€€€"}} {
		var got captured
		s := shell(t, &got, `printf '€€€'; printf end >&2`)
		s.OutputLimit = c.limit
		result := run(t, r, s)
		if got.stdout() != c.want || got.out[Stderr].String() != "end" {
			t.Errorf("limit %d: %q, %q", c.limit, got.stdout(), got.out[Stderr].String())
		}
		if result.Stdout.Bytes != 9 || result.Stdout.Truncated != (c.limit < 9) {
			t.Errorf("limit %d: %+v", c.limit, result.Stdout)
		}
	}
}

// marked finds live processes that carry the environment variable of a test.
func marked(t *testing.T, mark string) (pids []string) {
	t.Helper()
	entries, err := os.ReadDir("/proc")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		env, err := os.ReadFile("/proc/" + e.Name() + "/environ")
		if err == nil && bytes.Contains(env, []byte("MARK="+mark)) {
			pids = append(pids, e.Name())
		}
	}
	return pids
}

const daemons = `setsid sleep 1000 & (setsid sh -c 'sleep 1000 & sleep 1000' & ) ; nohup sleep 1000 >/dev/null 2>&1 & `

func TestNoDescendantOutlivesItsCommand(t *testing.T) {
	for _, c := range []struct {
		name, script string
		change       func(*Spec)
		end          func(*Runner, context.CancelFunc)
		outcome      string
	}{
		{name: "own end", script: daemons + "exit 3", outcome: Exited},
		{name: "timeout", script: daemons + "sleep 1000", change: func(s *Spec) { s.Timeout = 100 * time.Millisecond }, outcome: TimedOut},
		{name: "end of the call", script: daemons + "sleep 1000", end: func(_ *Runner, cancel context.CancelFunc) { cancel() }, outcome: Killed},
		{name: "kill", script: daemons + "sleep 1000", end: func(r *Runner, _ context.CancelFunc) {
			if n, err := r.KillAll(); n != 1 || err != nil {
				t.Errorf("killed %d, %v", n, err)
			}
		}, outcome: Killed},
		{name: "ignored signals", script: `trap '' TERM INT HUP; ` + daemons + "sleep 1000", change: func(s *Spec) { s.Timeout = 100 * time.Millisecond }, outcome: TimedOut},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRunner(t)
			mark := fmt.Sprint(time.Now().UnixNano())
			var out captured
			s := shell(t, &out, c.script)
			s.Env = append(s.Env, "MARK="+mark)
			if c.change != nil {
				c.change(&s)
			}
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			if c.end != nil {
				ended := make(chan struct{})
				time.AfterFunc(150*time.Millisecond, func() { defer close(ended); c.end(r, cancel) })
				defer func() { <-ended }()
			}
			start := time.Now()
			got, err := r.Run(ctx, s)
			if err != nil || got.Outcome != c.outcome {
				t.Errorf("got %+v, %v", got, err)
			}
			if took := time.Since(start); took > 5*time.Second {
				t.Errorf("took %v", took)
			}
			if left := marked(t, mark); len(left) > 0 {
				t.Errorf("left: %v", left)
			}
		})
	}
}

func TestBackgroundChildDoesNotHoldTheCall(t *testing.T) {
	r := newRunner(t)
	for name, script := range map[string]string{
		"silent": `echo now; sleep 1000 & exit 5`,
		"noisy":  `echo now; (while :; do echo again; done) & exit 5`,
	} {
		t.Run(name, func(t *testing.T) {
			var c captured
			start := time.Now()
			got := run(t, r, shell(t, &c, script))
			if got.Outcome != Exited || got.Code != 5 || !strings.HasPrefix(c.stdout(), "now\n") && name == "silent" {
				t.Errorf("got %+v, %.20q", got, c.stdout())
			}
			if took := time.Since(start); took > 5*time.Second {
				t.Errorf("took %v", took)
			}
		})
	}
	t.Run("late words", func(t *testing.T) {
		for range 5 { // a busy host may wake the child after the time that it has
			var c captured
			if run(t, r, shell(t, &c, `(sleep 0.02; echo late) & exit 0`)); c.stdout() == "late\n" {
				return
			}
		}
		t.Error("no child was heard")
	})
}

func TestSlowReaderLosesNothing(t *testing.T) {
	r := newRunner(t)
	var c captured
	s := shell(t, &c, `head -c 400000 /dev/zero`)
	s.Output = func(st Stream, p []byte) { time.Sleep(20 * time.Millisecond); c.sink(st, p) }
	got := run(t, r, s)
	if len(c.stdout()) != 400_000 || got.Stdout.Bytes != 400_000 {
		t.Errorf("%d bytes, %+v", len(c.stdout()), got)
	}
}

func TestStdin(t *testing.T) {
	r := newRunner(t)
	feed := func(s *Spec, chunks int, size int, end bool) *int {
		in, taken := make(chan []byte, chunks), new(int)
		for range chunks {
			in <- bytes.Repeat([]byte("i"), size)
		}
		if end {
			close(in)
		}
		s.Stdin, s.Taken = in, func() { *taken++ }
		return taken
	}
	t.Run("whole", func(t *testing.T) {
		var c captured
		s := spec(t, &c, "wc", "-c")
		taken := feed(&s, 200, 32<<10, true)
		run(t, r, s)
		if got := strings.TrimSpace(c.stdout()); got != fmt.Sprint(200*32<<10) || *taken != 200 {
			t.Errorf("got %s, %d taken", got, *taken)
		}
	})
	t.Run("closed early", func(t *testing.T) {
		var c captured
		s := spec(t, &c, "sh", "-c", "exec <&-; sleep 0.3")
		taken := feed(&s, 50, 32<<10, true)
		got := run(t, r, s)
		if got.Outcome != Exited || got.Detail != "standard input was closed before its end" || *taken != 50 {
			t.Errorf("got %+v, %d taken", got, *taken)
		}
	})
	t.Run("never ends", func(t *testing.T) {
		for _, chunks := range []int{0, 50} {
			var c captured
			s := spec(t, &c, "true")
			feed(&s, chunks, 32<<10, false)
			if got := run(t, r, s); got.Outcome != Exited || got.Code != 0 {
				t.Errorf("got %+v", got)
			}
		}
	})
	t.Run("none", func(t *testing.T) {
		var c captured
		if got := run(t, r, spec(t, &c, "cat")); got.Outcome != Exited {
			t.Errorf("got %+v", got)
		}
	})
}

func TestCombinedKeepsOrderAndExtraFiles(t *testing.T) {
	r := newRunner(t)
	ours, childs, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer ours.Close()
	var c captured
	s := shell(t, &c, `for i in 1 2 3; do echo o$i; echo e$i >&2; done; echo extra >&3`)
	s.Combined, s.Extra = true, []*os.File{childs}
	run(t, r, s)
	_ = childs.Close()
	extra := make([]byte, 10)
	n, err := ours.Read(extra)
	if want := "o1\ne1\no2\ne2\no3\ne3\n"; c.stdout() != want || string(extra[:n]) != "extra\n" || err != nil {
		t.Errorf("got %q, %q, %v", c.stdout(), extra[:n], err)
	}
}

func TestCommandIsConfinedFromItsFirstInstruction(t *testing.T) {
	r := newRunner(t)
	var c captured
	run(t, r, shell(t, &c, `cat /proc/self/oom_score_adj; id -u; id -G; cut -d: -f3 /proc/self/cgroup | tail -1; ps -o sid= -p $$ | tr -d ' '; echo $$; for f in /proc/self/fd/*; do readlink $f; done | grep -v ^/proc | wc -l`))
	lines := strings.Split(strings.TrimSpace(c.stdout()), "\n")
	if len(lines) != 7 {
		t.Fatalf("got %q", c.stdout())
	}
	if lines[0] != "500" || lines[1] != "65534" || lines[2] != "65534 100" || !strings.HasSuffix(lines[3], "/commands/command-1") {
		t.Errorf("got %q", lines)
	}
	if lines[4] != lines[5] {
		t.Errorf("session %s of process %s", lines[4], lines[5])
	}
	if lines[6] != "3" {
		t.Errorf("%s descriptors", lines[6])
	}
	if own, err := os.ReadFile("/proc/self/oom_score_adj"); err != nil || strings.TrimSpace(string(own)) != "0" {
		t.Errorf("agent has %s, %v", own, err)
	}
}

func TestExitCodesAreNeverStolen(t *testing.T) {
	r := newRunner(t)
	const workers, each = 8, 60
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			for i := range each {
				want := (w*each + i) % 256
				result, err := r.Run(t.Context(), shell(t, &captured{}, fmt.Sprintf("(exit 9) & (sh -c 'sleep 0.001 & exit 0' &) ; exit %d", want)))
				if err != nil || result.Outcome != Exited || result.Code != want {
					t.Errorf("got %+v, %v, want %d", result, err, want)
					return
				}
			}
		})
	}
	wg.Wait()
}

func TestOrphansAreReaped(t *testing.T) {
	r := newRunner(t)
	run(t, r, shell(t, &captured{}, `for i in $(seq 200); do (sh -c 'sleep 0.01 & exit' &); done`))
	for range 100 {
		if zombies := zombieChildren(t); zombies == 0 {
			return
		}
		time.Sleep(20 * time.Millisecond)
	}
	t.Errorf("%d zombies", zombieChildren(t))
}

func zombieChildren(t *testing.T) (n int) {
	t.Helper()
	entries, err := os.ReadDir("/proc")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		stat, err := os.ReadFile("/proc/" + e.Name() + "/stat")
		if err != nil {
			continue
		}
		_, rest, _ := strings.Cut(string(stat), ") ")
		if fields := strings.Fields(rest); len(fields) > 1 && fields[0] == "Z" && fields[1] == fmt.Sprint(os.Getpid()) {
			n++
		}
	}
	return n
}

func TestNothingStartsAfterAKill(t *testing.T) {
	r := newRunner(t)
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			got, err := r.Run(t.Context(), spec(t, &captured{}, "sleep", "1000"))
			if err != nil || got.Outcome != Killed {
				t.Errorf("got %+v, %v", got, err)
			}
		})
	}
	ended := make(chan struct{})
	go func() { wg.Wait(); close(ended) }()
	for {
		select {
		case <-ended:
			return
		case <-time.After(5 * time.Millisecond):
			if _, err := r.KillAll(); err != nil {
				t.Error(err)
			}
		}
	}
}

func TestWhole(t *testing.T) {
	for _, c := range []struct {
		in   string
		want int
	}{{"", 0}, {"a", 1}, {"€", 3}, {"\xe2", 0}, {"a\xe2\x82", 1}, {"\xf0\x9f\x98", 0}, {"😀", 4}, {"\x80\x80\x80", 3}, {"a\xff", 2}, {"\xc3\xa9\xc3", 2}} {
		if got := Whole([]byte(c.in)); got != c.want {
			t.Errorf("Whole(%q) = %d, want %d", c.in, got, c.want)
		}
	}
}
