package pool

import (
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

func TestCircuitOpensAfterThreeFailuresAndClosesByItself(t *testing.T) {
	bubble(t, config(), func(t *testing.T, w *world, p *Pool[*fakeMachine]) {
		waiting := claim(p)
		for i := range threshold {
			for !w.finish("fail") {
				time.Sleep(retryBase)
				synctest.Wait()
			}
			if s := p.Stats(); (s.Circuit == CircuitOpen) != (i == threshold-1) {
				t.Fatalf("after %d failures the circuit is %s", i+1, s.Circuit)
			}
		}
		var circuit *CircuitError
		if !waiting.done || !errors.As(waiting.err, &circuit) || !errors.Is(waiting.err, ErrCircuitOpen) || !errors.Is(waiting.err, errMade) {
			t.Fatalf("the waiting claim: done %v, error %v", waiting.done, waiting.err)
		}
		if c := claim(p); !c.done || !strings.Contains(c.err.Error(), "no such kernel") {
			t.Fatalf("a claim on an open circuit: done %v, error %v", c.done, c.err)
		}
		for w.making() > 0 { // what was under way ends too
			w.finish("fail")
		}
		time.Sleep(openBase - time.Millisecond)
		synctest.Wait()
		if w.making() != 0 {
			t.Fatal("a make was started on an open circuit")
		}
		time.Sleep(time.Millisecond)
		synctest.Wait()
		if w.making() != 1 || p.Stats().Circuit != CircuitHalfOpen {
			t.Fatalf("want one trial, got %d, circuit %s", w.making(), p.Stats().Circuit)
		}
		w.finish("fail") // the next pause is twice as long
		time.Sleep(2*openBase - time.Millisecond)
		synctest.Wait()
		if w.making() != 0 {
			t.Fatal("the pause did not grow")
		}
		time.Sleep(time.Millisecond)
		synctest.Wait()
		late := claim(p) // joins the trial
		w.fill()
		if s := p.Stats(); s.Circuit != CircuitClosed || s.CircuitReason != "" || s.Ready != 2 || late.err != nil {
			t.Fatalf("after recovery: %+v, late claim %v", s, late.err)
		}
		give(p, late.m)
	})
}

func TestCircuitOpensWhenMachinesDieInThePool(t *testing.T) {
	bubble(t, config(), func(t *testing.T, w *world, p *Pool[*fakeMachine]) {
		for range 200 { // every machine is made well and dies at once
			w.finish("ok")
			w.machines[len(w.machines)-1].die()
			time.Sleep(100 * time.Millisecond)
			synctest.Wait()
		}
		if n := len(w.machines); n > 15 { // 20 s with growing pauses, not 200 machines
			t.Fatalf("%d machines were made one after another though all died", n)
		}
		if s := p.Stats(); s.CircuitReason == "" {
			t.Fatalf("no reason: %+v", s)
		}
	})
}

func TestStillbornMachineIsAFailureAndIsClosed(t *testing.T) {
	bubble(t, config(), func(t *testing.T, w *world, p *Pool[*fakeMachine]) {
		w.finish("dead")
		time.Sleep(time.Second)
		synctest.Wait()
		if s := p.Stats(); s.MakeFailures != 1 || s.Ready != 0 || w.machines[0].closes != 1 {
			t.Fatalf("%+v, closes %d", s, w.machines[0].closes)
		}
	})
}

func TestHangingMakeTimesOut(t *testing.T) {
	bubble(t, config(), func(t *testing.T, w *world, p *Pool[*fakeMachine]) {
		time.Sleep(config().MakeTimeout + time.Millisecond)
		synctest.Wait()
		if s := p.Stats(); s.MakeFailures != 2 || !strings.Contains(s.CircuitReason, "not made within 30s") {
			t.Fatalf("%+v", s)
		}
	})
}

func TestLateResultsSayNothingAboutTheCircuit(t *testing.T) {
	now := time.Unix(1000, 0)
	c := circuit{state: CircuitClosed}
	bad := errors.New("bad")
	for i := range threshold {
		if opened := c.failed(0, now, bad); opened != (i == threshold-1) {
			t.Fatalf("failure %d opened: %v", i, opened)
		}
	}
	c.made(0) // had started before
	c.failed(0, now, bad)
	if !c.blocks(now) || c.level != 1 {
		t.Fatalf("%+v", c)
	}
	now = c.until
	if c.blocks(now) || c.allowed(now, 5) != 1 || c.allowed(now, 5) != 0 {
		t.Fatalf("want one trial: %+v", c)
	}
	c.untried(c.epoch)
	if c.allowed(now, 5) != 1 {
		t.Fatal("a trial that did not start was not repeated")
	}
	c.made(c.epoch)
	if c.state != CircuitClosed || c.reason != nil || c.allowed(now, 5) != 5 {
		t.Fatalf("%+v", c)
	}
}

func TestPauseGrowsToItsLimit(t *testing.T) {
	now := time.Unix(1000, 0)
	c := circuit{state: CircuitClosed}
	var last time.Duration
	for range 80 {
		c.open(now)
		pause := c.until.Sub(now)
		if pause < last || pause > openMax {
			t.Fatalf("pause of %s after %s", pause, last)
		}
		last = pause
	}
	if last != openMax {
		t.Fatalf("longest pause %s", last)
	}
}

// allowed is both in one.
func (c *circuit) allowed(now time.Time, want int) int {
	n := c.lets(now, want)
	c.let(n)
	return n
}
