package vmmtest

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ephemeral-run/ephemeral/guestagent/proto"
	"github.com/ephemeral-run/ephemeral/vmm"
)

func (s *suite) testStats(t *testing.T) {
	m, a := s.running(t)
	before, err := m.Stats()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat("/proc/" + strconv.Itoa(before.Pid)); err != nil {
		t.Errorf("pid %d: %v", before.Pid, err)
	}
	memory := int64(s.Shape.MemoryMiB) << 20
	if before.PrivateBytes < 1<<20 || before.PrivateBytes > memory/2 {
		t.Errorf("%d bytes of private memory; the template's should be shared", before.PrivateBytes)
	}
	const grow = 50_000_000
	if err := a.Run(s.within(t, callTime), nil, io.Discard, "sh", "-c", "head -c "+strconv.Itoa(grow)+" /dev/urandom >/tmp/big"); err != nil {
		t.Fatal(err)
	}
	after, err := m.Stats()
	if err != nil {
		t.Fatal(err)
	}
	if grown := after.PrivateBytes - before.PrivateBytes; grown < grow/2 {
		t.Errorf("the guest wrote %d bytes, private memory grew by %d", grow, grown)
	}
	if after.CPU <= before.CPU {
		t.Errorf("CPU time does not grow: %v, %v", before.CPU, after.CPU)
	}
}

// state is a state in which a machine can end.
type state struct {
	name string
	make func(*suite, *testing.T) vmm.Machine
}

func states() []state {
	return []state{
		{"booting", func(s *suite, t *testing.T) vmm.Machine { return s.boot(t, nil) }},
		{"booting and dialled", func(s *suite, t *testing.T) vmm.Machine {
			m := s.boot(t, nil)
			dialInBackground(s, t, m)
			return m
		}},
		{"restored", func(s *suite, t *testing.T) vmm.Machine { return s.restore(t) }},
		{"restored and dialled", func(s *suite, t *testing.T) vmm.Machine {
			m := s.restore(t)
			dialInBackground(s, t, m)
			return m
		}},
		{"running", func(s *suite, t *testing.T) vmm.Machine { m, _ := s.running(t); return m }},
		{"busy", func(s *suite, t *testing.T) vmm.Machine {
			m, a := s.running(t)
			busy(s, t, a)
			return m
		}},
		{"busy and paused", func(s *suite, t *testing.T) vmm.Machine {
			m, a := s.running(t)
			busy(s, t, a)
			if err := m.Pause(s.within(t, callTime)); err != nil {
				t.Fatal(err)
			}
			return m
		}},
		{"disconnected", func(s *suite, t *testing.T) vmm.Machine {
			m, _ := s.running(t)
			if err := m.Disconnect(); err != nil {
				t.Fatal(err)
			}
			return m
		}},
		{"snapshotted", func(s *suite, t *testing.T) vmm.Machine {
			dir := t.TempDir()
			m := s.boot(t, func(spec *vmm.Spec) { spec.RAM = filepath.Join(dir, "ram") })
			if err := s.freeze(t, m, dir); err != nil {
				t.Fatal(err)
			}
			return m
		}},
	}
}

// dialInBackground leaves a call in progress, which the end of the machine must end.
func dialInBackground(s *suite, t *testing.T, m vmm.Machine) {
	ctx, wg := s.background(t)
	wg.Go(func() {
		if conn, err := m.Dial(ctx, proto.AgentPort); err == nil {
			_ = conn.Close()
		}
	})
}

// busy keeps a stream of output going until the machine ends.
func busy(s *suite, t *testing.T, a *Agent) {
	t.Helper()
	ctx, wg := s.background(t)
	flowing := &firstWrite{came: make(chan struct{})}
	wg.Go(func() { _ = a.Run(ctx, nil, flowing, "cat", "/dev/zero") })
	select {
	case <-flowing.came:
	case <-ctx.Done():
		t.Fatal("no output")
	}
}

// background is for what goes on beside the test: a context and a group, over and waited for at its end.
func (s *suite) background(t *testing.T) (context.Context, *sync.WaitGroup) {
	ctx, cancel := context.WithTimeout(context.Background(), s.limit(bootTime))
	wg := new(sync.WaitGroup)
	t.Cleanup(func() {
		cancel()
		wg.Wait()
	})
	return ctx, wg
}

type firstWrite struct {
	once sync.Once
	came chan struct{}
}

// Write never fails.
func (w *firstWrite) Write(p []byte) (int, error) {
	if len(p) > 0 {
		w.once.Do(func() { close(w.came) })
	}
	return len(p), nil
}

func (s *suite) testCloseInEveryState(t *testing.T) {
	for _, st := range states() {
		t.Run(st.name, func(t *testing.T) {
			m := st.make(s, t)
			var wg sync.WaitGroup
			for range 4 { // at the same time and again
				wg.Go(func() {
					if err := m.Close(); err != nil {
						t.Error(err)
					}
				})
			}
			wg.Wait()
			if err := m.Close(); err != nil {
				t.Error(err)
			}
			select {
			case <-m.Done():
			default:
				t.Error("closed, but not done")
			}
			if err := m.Err(); err != nil {
				t.Errorf("closed, but: %v", err)
			}
		})
	}
}

func (s *suite) testAfterClose(t *testing.T) {
	m, _ := s.running(t)
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
	ctx := s.within(t, callTime)
	for name, call := range map[string]func() error{
		"dial":       func() error { _, err := m.Dial(ctx, proto.AgentPort); return err },
		"listen":     func() error { _, err := m.Listen(proto.BrokerPort); return err },
		"pause":      func() error { return m.Pause(ctx) },
		"resume":     func() error { return m.Resume(ctx) },
		"disconnect": m.Disconnect,
		"snapshot":   func() error { return m.Snapshot(ctx, t.TempDir()) },
		"stats":      func() error { _, err := m.Stats(); return err },
	} {
		if err := call(); !errors.Is(err, vmm.ErrClosed) {
			t.Errorf("%s after close: %v", name, err)
		}
	}
}

// testKilledInEveryState kills the VMM from outside.
func (s *suite) testKilledInEveryState(t *testing.T) {
	for _, st := range states() {
		t.Run(st.name, func(t *testing.T) {
			m := st.make(s, t)
			got, err := m.Stats()
			if err != nil {
				t.Fatal(err)
			}
			if err := unix.Kill(got.Pid, unix.SIGKILL); err != nil {
				t.Fatal(err)
			}
			s.mustEnd(t, m, endTime, vmm.ErrVMM)
			if err := m.Pause(s.within(t, callTime)); !errors.Is(err, vmm.ErrClosed) {
				t.Errorf("pause of a killed machine: %v", err)
			}
		})
	}
}

// mustEnd waits for the machine to end by itself, with the error or, for nil, without one.
func (s *suite) mustEnd(t *testing.T, m vmm.Machine, within time.Duration, want error) {
	t.Helper()
	begin := time.Now()
	select {
	case <-m.Done():
	case <-time.After(s.limit(within)):
		t.Fatal("its end was not noticed")
	}
	t.Logf("ended after %v: %v", time.Since(begin), m.Err())
	if err := m.Err(); !errors.Is(err, want) {
		t.Errorf("it ended with %v, want %v", err, want)
	}
	if err := m.Close(); err != nil {
		t.Error(err)
	}
	if err := m.Err(); !errors.Is(err, want) {
		t.Errorf("after close the end is %v, want %v", err, want)
	}
}

func (s *suite) testPowerOff(t *testing.T) { s.testGuestEnd(t, s.Guest.PowerOff, nil) }
func (s *suite) testReboot(t *testing.T)   { s.testGuestEnd(t, s.Guest.Reboot, vmm.ErrRebooted) }
func (s *suite) testPanic(t *testing.T)    { s.testGuestEnd(t, s.Guest.Panic, vmm.ErrPanicked) }

// testGuestEnd ends the guest from inside, several times, for what is told last is easily lost.
func (s *suite) testGuestEnd(t *testing.T, end func(context.Context, *Agent) error, want error) {
	for range 5 {
		m, a := s.running(t)
		ended := make(chan error, 1)
		go func() { ended <- end(s.within(t, 2*callTime), a) }()
		s.mustEnd(t, m, 3*callTime, want)
		<-ended // its connection was lost with the guest, or it was answered just before
	}
}
