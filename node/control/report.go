package control

import (
	"time"

	"github.com/ephemeral-run/ephemeral/run/pools"
	"github.com/ephemeral-run/ephemeral/vmm/pool"
)

// look makes a report of a pool as it is.
func (c *Controller) look(s *subject) pools.Report {
	st := s.Pool.Stats()
	r := s.Report
	r.Pool, r.Node, r.At = s.Name, c.node, time.Now().UTC()
	r.Image, r.Revision, r.Error = s.Image(), s.desired.Revision, s.refused
	r.State = c.state(s, st)
	r.Settings = settingsOf(s.applied)
	r.Ready, r.Leased, r.Refilling, r.Destroying, r.Waiting = st.Ready+st.Warming, st.Leased, st.Making, st.Destroying, st.Waiting
	r.Target, r.Reason = st.Target, st.Reason
	r.Circuit, r.CircuitReason, r.Admission = string(st.Circuit), st.CircuitReason, st.Admission
	if !st.CircuitUntil.IsZero() {
		at := st.CircuitUntil.UTC()
		r.RetryAt = &at
	}
	if err := s.Unready(); err != nil {
		r.Reason = err.Error()
	} else if s.desired.Drains(c.node) {
		r.Reason = "Drained by an operator: no machine is kept ready and no run is taken."
	}
	r.OldestReadySeconds, r.LongestWaitSeconds = st.OldestReady.Seconds(), st.LongestWait.Seconds()
	r.Claims, r.Misses, r.WaitSeconds = st.Claims, st.Claims-st.Hits, st.Wait.Seconds()
	r.Made, r.MakeFailures = st.Made, st.MakeFailures
	if s.Latencies != nil {
		r.ClaimLatency, r.RestoreLatency = s.Latencies.report()
	}
	r.Decisions = []pools.Decision{}
	for _, d := range st.Decisions {
		r.Decisions = append(r.Decisions, pools.Decision{At: d.At.UTC(), What: d.What, Reason: d.Reason})
	}
	return r
}

// The states of a pool on a node.
const (
	stateFailing  = "failing"  // machines cannot be made
	stateDraining = "draining" // drained, with machines still in use
	stateDrained  = "drained"
	stateFilling  = "filling" // fewer are ready than should be
	stateServing  = "serving"
)

func (c *Controller) state(s *subject, st pool.Stats) string {
	switch {
	case s.desired.Drains(c.node) && st.Leased+st.Ready+st.Destroying > 0:
		return stateDraining
	case s.desired.Drains(c.node):
		return stateDrained
	case st.Circuit != pool.CircuitClosed, s.Unready() != nil:
		return stateFailing
	case st.Ready+st.Warming < st.Target:
		return stateFilling
	}
	return stateServing
}

func settingsOf(cfg pool.Config) pools.Settings {
	return pools.Settings{
		MinReady: cfg.MinReady, MaxReady: cfg.MaxReady, MaxMachines: cfg.MaxMachines, RefillConcurrency: cfg.RefillConcurrency,
		MaxAgeSeconds: cfg.MaxAge.Seconds(), TargetMissRate: cfg.Autoscale.TargetMissRate,
	}
}
