package main_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/ephemeral-run/ephemeral/images"
	"github.com/ephemeral-run/ephemeral/node/guest"
	"github.com/ephemeral-run/ephemeral/vmm"
	"github.com/ephemeral-run/ephemeral/vmm/network"
	"github.com/ephemeral-run/ephemeral/vmm/qemu"
	"github.com/ephemeral-run/ephemeral/vmm/vmmtest"
)

// These tests run the agent that is in the image, in real machines: what it does as the first process cannot be seen
// elsewhere.

const memoryMiB = 256

// lab makes machines.
type lab struct {
	driver   *qemu.Driver
	image    images.Image
	network  *network.Network
	template vmm.Template
	taps     map[string]*network.Tap
	made     int
}

func newLab(t *testing.T) *lab {
	t.Helper()
	dir := os.Getenv("EPHEMERAL_TEST_IMAGE")
	if dir == "" {
		dir = filepath.Join("..", "..", "build", "images", "base")
	}
	image, err := images.Open(dir)
	if err != nil {
		t.Fatalf("%v: run make image", err)
	}
	path := os.Getenv("EPHEMERAL_QEMU")
	if path == "" {
		path = "qemu-system-x86_64"
	}
	// Without vmgenid the kernel does not notice by itself that it was cloned, so what differs is the agent's work.
	driver, err := qemu.New(qemu.Config{Path: path, Accel: "auto", TBSize: 64, VMGenID: false})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = driver.Close() })
	net, err := network.Open(within(t, time.Minute), fmt.Sprintf("guestagent-test-%d", os.Getpid()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = net.Close() })
	l := &lab{driver: driver, image: image, network: net, taps: make(map[string]*network.Tap)}
	l.template = l.makeTemplate(t)
	return l
}

func (l *lab) spec(t *testing.T) vmm.Spec {
	t.Helper()
	l.made++
	id := fmt.Sprintf("%012x", l.made)
	tap, err := l.network.NewTap(id, 65534) // the VMM gets it opened, whoever owns it
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = tap.Close() })
	l.taps[id] = tap
	return vmm.Spec{
		ID: id, Dir: t.TempDir(), Image: l.image, Shape: vmm.Shape{VCPUs: 1, MemoryMiB: memoryMiB},
		Launcher: &vmmtest.Launcher{}, NIC: &vmm.NIC{Tap: tap.Name, MAC: tap.MAC, File: tap.File},
	}
}

func (l *lab) makeTemplate(t *testing.T) vmm.Template {
	t.Helper()
	ctx := within(t, 3*time.Minute)
	dir := t.TempDir()
	spec := l.spec(t)
	spec.RAM = filepath.Join(dir, "ram")
	m, err := l.driver.Boot(ctx, spec)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	for _, step := range []func() error{
		func() error { return guest.Connect(m.Dial).Ping(ctx) },
		func() error { return guest.Warm(ctx, m) },
		m.Disconnect,
		func() error { return m.Pause(ctx) },
		func() error { return m.Snapshot(ctx, dir) },
	} {
		if err := step(); err != nil {
			t.Fatal(err)
		}
	}
	return vmm.Template{
		Dir: dir, RAM: spec.RAM, Image: l.image, Shape: spec.Shape,
		Driver: l.driver.Name(), Version: l.driver.Version(), MadeAt: time.Now(),
	}
}

// clone is a running machine that nobody has prepared.
func (l *lab) clone(t *testing.T) (vmm.Machine, *guest.Client) {
	t.Helper()
	ctx := within(t, time.Minute)
	m, err := l.driver.Restore(ctx, l.template, l.spec(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = m.Close() })
	if err := m.Resume(ctx); err != nil {
		t.Fatal(err)
	}
	return m, guest.Connect(m.Dial)
}

// prepared is a clone ready for work.
func (l *lab) prepared(t *testing.T) (*machine, guest.Prepared) {
	t.Helper()
	m, client := l.clone(t)
	begin := time.Now()
	prepared, err := client.Prepare(within(t, time.Minute), guest.Identity{
		Hostname: fmt.Sprintf("m-%d", l.made), MachineID: fmt.Sprintf("%032x", l.made),
		MAC: fmt.Sprintf("02:00:00:00:00:%02x", l.made), Address: fmt.Sprintf("10.0.0.%d/24", l.made),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("prepared in %v, clock off by %v", time.Since(begin), prepared.ClockError)
	return &machine{t: t, Client: client, tap: l.taps[m.ID()]}, prepared
}

func within(t *testing.T, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	t.Cleanup(cancel)
	return ctx
}

type machine struct {
	*guest.Client
	t   *testing.T
	tap *network.Tap
}

// run runs a script as the worker.
func (m *machine) run(script string, change ...func(*guest.Command)) (stdout, stderr string, exit guest.Exit) {
	m.t.Helper()
	c := guest.Command{Args: []string{"/bin/sh", "-c", script}}
	for _, f := range change {
		f(&c)
	}
	var out, errs bytes.Buffer
	exit, err := m.Exec(within(m.t, 2*time.Minute), c, &out, &errs)
	if err != nil {
		m.t.Fatalf("%s: %v", script, err)
	}
	return strings.TrimSpace(out.String()), strings.TrimSpace(errs.String()), exit
}

// say runs a script that has to succeed and returns what it printed.
func (m *machine) say(script string, change ...func(*guest.Command)) string {
	m.t.Helper()
	stdout, stderr, exit := m.run(script, change...)
	if exit.Outcome != "exited" || exit.Code != 0 {
		m.t.Fatalf("%s: %+v: %s", script, exit, stderr)
	}
	return stdout
}

func asRoot(c *guest.Command) { c.User = "root" }

func TestMachine(t *testing.T) {
	l := newLab(t)
	t.Run("first process", l.testFirstProcess)
	t.Run("worker", l.testWorker)
	t.Run("clones differ", l.testClonesDiffer)
	t.Run("prepare is required", l.testPrepareIsRequired)
	t.Run("no way out", l.testNoWayOut)
	t.Run("out of memory", l.testOutOfMemory)
	t.Run("descendants", l.testDescendants)
	t.Run("sessions and cgroups", l.testSessions)
	t.Run("bombs", l.testBombs)
	t.Run("space", l.testSpace)
	t.Run("100,000 files", l.testManyFiles)
	t.Run("flood of output", l.testFlood)
	t.Run("long lines and bytes", l.testLines)
	t.Run("zombies", l.testZombies)
	t.Run("5,000 processes", l.testShortProcesses)
	t.Run("limits", l.testLimits)
	t.Run("dead agent", l.testDeadAgent)
	t.Run("power off", l.testPowerOff)
}

func (l *lab) testFirstProcess(t *testing.T) {
	m, _ := l.prepared(t)
	if got := m.say("cat /proc/1/comm /proc/1/oom_score_adj"); got != "init\n-1000" {
		t.Errorf("first process: %q", got)
	}
	mounts := m.say("cat /proc/mounts")
	for _, want := range []string{"overlay / overlay rw", " /proc proc ", " /sys sysfs ", " /dev devtmpfs ", " /dev/shm tmpfs ", " /tmp tmpfs ", " /run tmpfs ", " /sys/fs/cgroup cgroup2 "} {
		if !strings.Contains(mounts, want) {
			t.Errorf("no %q in mounts:\n%s", want, mounts)
		}
	}
	if got := m.say("cat /etc/resolv.conf; cat /proc/sys/net/ipv6/conf/all/disable_ipv6; cat /sys/class/net/lo/operstate"); got != "1\nunknown" {
		t.Errorf("network: %q", got)
	}
	if got := m.say("for f in /proc/[0-9]*/stat; do cat $f; done 2>/dev/null | awk '$3 == \"Z\"' | wc -l"); got != "0" {
		t.Errorf("%s zombies", got)
	}
}

func (l *lab) testWorker(t *testing.T) {
	m, prepared := l.prepared(t)
	got := m.say(`whoami; pwd; echo $HOME $LANG; umask; ulimit -n; ulimit -c; cat /proc/self/oom_score_adj; cut -d: -f3 /proc/self/cgroup | cut -d/ -f2; nproc`)
	want := "worker\n" + prepared.Scratch + "\n/home/worker C.UTF-8\n0022\n65536\n0\n500\ncommands\n1"
	if got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	if got := m.say(`echo ephemeral-test > /tmp/x; stat -c '%U %G %a' /tmp/x . ..`); got != "worker worker 644\nworker worker 755\nroot root 755" {
		t.Errorf("ownership: %q", got)
	}
	for _, forbidden := range []string{"cat /etc/shadow", "touch /etc/x", "dmesg", "kill -9 1", "mkdir /sys/fs/cgroup/x", "cat /proc/1/environ", "ls /root", "echo 0 > /proc/self/oom_score_adj", "rmdir ../scratch"} {
		if _, _, exit := m.run(forbidden); exit.Code == 0 {
			t.Errorf("%s: allowed", forbidden)
		}
	}
}

// identity is everything by which one could tell machines apart, or not.
const identity = `hostname; cat /etc/machine-id /etc/hosts /proc/sys/kernel/random/boot_id /proc/sys/kernel/random/uuid
head -c 16 /dev/urandom | od -An -tx1; python3 -c 'import random, uuid, os; print(random.random(), uuid.uuid4(), os.urandom(8).hex())'
openssl rand -hex 8; mktemp -u; pwd; cat /sys/class/net/eth0/address; hostname -I`

func (l *lab) testClonesDiffer(t *testing.T) {
	seen := map[string]int{}
	for range 3 {
		m, prepared := l.prepared(t)
		if prepared.ClockError.Abs() > guest.MaxClockError {
			t.Errorf("clock is off by %v", prepared.ClockError)
		}
		for line := range strings.Lines(m.say(identity)) {
			if !strings.HasPrefix(line, "127.0.0.1") {
				seen[line]++
			}
		}
	}
	for line, times := range seen {
		if times > 1 {
			t.Errorf("%d clones have %q", times, line)
		}
	}
	if len(seen) < 3*10 {
		t.Errorf("only %d values", len(seen))
	}
}

func (l *lab) testPrepareIsRequired(t *testing.T) {
	_, client := l.clone(t)
	_, err := client.Exec(within(t, time.Minute), guest.Command{Args: []string{"true"}}, nil, nil)
	if !errors.As(err, new(*guest.RefusedError)) {
		t.Errorf("exec before prepare: %v", err)
	}
	p, err := client.Prepare(within(t, time.Minute), guest.Identity{Hostname: "a", MachineID: strings.Repeat("a", 32)})
	if err != nil || !regexp.MustCompile(`^/tmp/ephemeral-run-[A-Za-z0-9]{6}/scratch$`).MatchString(p.Scratch) {
		t.Errorf("prepare: %+v, %v", p, err)
	}
	if _, err := client.Prepare(within(t, time.Minute), guest.Identity{Hostname: "b", MachineID: strings.Repeat("b", 32)}); !errors.Is(err, guest.ErrNotPrepared) {
		t.Errorf("second prepare: %v", err)
	}
}

func (l *lab) testNoWayOut(t *testing.T) {
	m, _ := l.prepared(t)
	begin := time.Now()
	_, stderr, exit := m.run("curl -sS https://example.com")
	if exit.Code != 6 || stderr != "curl: (6) Could not resolve host: example.com" {
		t.Errorf("%d, %q", exit.Code, stderr)
	}
	if took := time.Since(begin); took > 10*time.Second {
		t.Errorf("took %v", took)
	}
	if got := m.say("cat /sys/class/net/eth0/operstate; ls /proc/net/if_inet6 && cat /proc/net/if_inet6; cat /proc/net/arp | wc -l"); !strings.HasSuffix(got, "1") {
		t.Errorf("network: %q", got)
	}
	begin = time.Now()
	if _, _, exit := m.run("curl -sS http://93.184.215.14/"); exit.Code != 28 && exit.Code != 7 {
		t.Errorf("connection: %+v", exit)
	}
	if took := time.Since(begin); took > 60*time.Second {
		t.Errorf("connection to nowhere took %v", took)
	}
	if packets, _, err := m.tap.Counters(); err != nil || packets < 2 { // the first try and one more
		t.Errorf("%d packets arrived on the tap, %v", packets, err)
	}
}

func (l *lab) testOutOfMemory(t *testing.T) {
	m, _ := l.prepared(t)
	_, _, exit := m.run(`exec python3 -c 'x = []
while True: x.append(bytearray(1 << 20))'`)
	if exit.Outcome != "out_of_memory" || exit.MemoryLimit <= 0 || exit.MemoryLimit >= memoryMiB<<20 || exit.Code != 137 {
		t.Errorf("got %+v", exit)
	}
	if got := m.say("echo alive"); got != "alive" {
		t.Errorf("after that: %q", got)
	}
}

func (l *lab) testDescendants(t *testing.T) {
	m, _ := l.prepared(t)
	_, _, exit := m.run("setsid sleep 1000 & (setsid sh -c 'sleep 1000 & sleep 1000' &); sleep 1000", func(c *guest.Command) { c.Timeout = time.Second })
	if exit.Outcome != "timed_out" {
		t.Errorf("got %+v", exit)
	}
	if got, _, _ := m.run("pgrep -c sleep", asRoot); got != "0" {
		t.Errorf("%s descendants are left", got)
	}
	begin := time.Now()
	if stdout, _, exit := m.run("echo now; sleep 1000 & exit 4"); stdout != "now" || exit.Code != 4 || time.Since(begin) > 20*time.Second {
		t.Errorf("background child: %q, %+v, %v", stdout, exit, time.Since(begin))
	}
}

func (l *lab) testPowerOff(t *testing.T) {
	m, client := l.clone(t)
	if err := client.Shutdown(within(t, time.Minute)); err != nil {
		t.Fatal(err)
	}
	select {
	case <-m.Done():
	case <-within(t, time.Minute).Done():
		t.Fatal("the machine is on")
	}
	if err := m.Err(); err != nil {
		t.Errorf("ended with %v", err)
	}
}
