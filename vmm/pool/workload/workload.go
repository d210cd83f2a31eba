package workload

import (
	"math/rand/v2"
	"time"
)

// Arrival is one claim.
type Arrival struct {
	At      time.Duration // since the start of the workload
	Service time.Duration // how long it keeps its machine
}

// Workload is a sequence of claims that can be played again and again.
type Workload struct {
	Process Process
	Service Dist
	Given   []Arrival // a recorded trace, in order; Process is not used then
	// ServiceGiven: the trace says how long claims keep their machines; Service is not used then.
	ServiceGiven bool
	Count        int // claims at the most
	Seed         uint64
}

// streams of random numbers: one for each kind of draw, so that a change of policy changes no draw of the workload.
const (
	streamArrivals = iota + 1
	streamService
	streamOther
)

// Random is a generator for draws that are not the workload's own, such as the times of restores.
func (w Workload) Random() *rand.Rand { return rand.New(rand.NewPCG(w.Seed, streamOther)) }

// Start plays the workload: the calls of the function it returns give the claims in order, then false.
func (w Workload) Start() func() (Arrival, bool) {
	service := rand.New(rand.NewPCG(w.Seed, streamService))
	next := w.given()
	if w.Given == nil {
		next = w.drawn()
	}
	n := 0
	return func() (Arrival, bool) {
		if n >= w.Count {
			return Arrival{}, false
		}
		n++
		a, ok := next()
		if ok && !w.ServiceGiven {
			a.Service = w.Service.Sample(service)
		}
		return a, ok
	}
}

func (w Workload) given() func() (Arrival, bool) {
	i := 0
	return func() (Arrival, bool) {
		if i == len(w.Given) {
			return Arrival{}, false
		}
		i++
		return w.Given[i-1], true
	}
}

func (w Workload) drawn() func() (Arrival, bool) {
	next := w.Process.Start(rand.New(rand.NewPCG(w.Seed, streamArrivals)))
	return func() (Arrival, bool) {
		at, ok := next()
		return Arrival{At: at}, ok
	}
}
