// Package cloneid tells whether machines that were made from one snapshot are individuals: it observes each from inside and
// compares what it saw. Values that two machines share, random ones above all, are the faults of a clone that was not made
// to differ. It knows nothing of how machines are made; see README.md.
package cloneid

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// Observation is what was seen of one machine.
type Observation struct {
	// Values are what must differ, by name: ids, names, addresses, one value of each source of randomness.
	Values map[string]string
	// Draws are random values that were drawn one after the other from one source. Clones may share them shifted.
	Draws []string
	// Ahead is how far the machine's clock is ahead of the observer's. It is wrong by half of RoundTrip at the most.
	Ahead, RoundTrip time.Duration
}

// Limits are what Compare demands.
type Limits struct {
	ClockError time.Duration // between a machine's clock and the observer's
	Required   []string      // names of values that every machine must have
}

// DefaultLimits are those that fit any machine with Python.
var DefaultLimits = Limits{
	ClockError: 50 * time.Millisecond,
	Required: []string{
		"kernel uuid", "boot id", "getrandom", "/dev/urandom", "/dev/random", "Python random", "Python SystemRandom", "Python uuid1",
		"TLS client random", "OpenSSL, linked", "hostname", "machine id",
	},
}

// wellMeasured is the longest round trip by which a clock is judged without allowance.
const wellMeasured = 20 * time.Millisecond

// Fault is one thing that is wrong.
type Fault struct {
	Name     string // of the value, "draws" or "clock"
	Machines []int  // which, by their place in the list; those that share it
	Detail   string
}

func (f Fault) String() string {
	return fmt.Sprintf("machines %v: %s: %s", f.Machines, f.Name, f.Detail)
}

// Compare returns what is wrong with machines that should be individuals; nothing is when it is empty. earlier are
// observations from before the machines were made to differ, if there are any: no draw of those may come again.
func Compare(machines, earlier []Observation, l Limits) (faults []Fault) {
	faults = append(faults, sharedValues(machines)...)
	faults = append(faults, sharedDraws(machines, earlier)...)
	for i, m := range machines {
		for _, name := range l.Required {
			if m.Values[name] == "" {
				faults = append(faults, Fault{name, []int{i}, "was not observed"})
			}
		}
		allowed := l.ClockError
		if m.RoundTrip > wellMeasured { // what a long round trip cannot tell
			allowed += m.RoundTrip / 2
		}
		if m.Ahead.Abs() > allowed {
			faults = append(faults, Fault{"clock", []int{i}, fmt.Sprintf("%v ahead, measured by a round trip of %v", m.Ahead, m.RoundTrip)})
		}
	}
	return faults
}

// Names are those of all values that were observed, sorted.
func Names(machines []Observation) (names []string) {
	for _, m := range machines {
		for name := range m.Values {
			if !slices.Contains(names, name) {
				names = append(names, name)
			}
		}
	}
	slices.Sort(names)
	return names
}

func sharedValues(machines []Observation) (faults []Fault) {
	for _, name := range Names(machines) {
		owners := make(map[string][]int)
		for i, m := range machines {
			value, there := m.Values[name]
			switch {
			case there && strings.TrimSpace(value) == "":
				faults = append(faults, Fault{name, []int{i}, "is empty"})
			case there:
				owners[value] = append(owners[value], i)
			}
		}
		for value, who := range owners {
			if len(who) > 1 {
				faults = append(faults, Fault{name, who, fmt.Sprintf("the same value %.80q", value)})
			}
		}
	}
	return faults
}

// SharedDraws is how many draws occur in more than one machine.
func SharedDraws(machines []Observation) int {
	n := 0
	for _, f := range sharedDraws(machines, nil) {
		n += len(f.Machines)
	}
	return n
}

// sharedDraws tells of draws that occur in several machines, one fault for each such group of machines.
func sharedDraws(machines, earlier []Observation) (faults []Fault) {
	owners := make(map[string][]int)
	for i, m := range machines {
		for _, d := range m.Draws {
			if !slices.Contains(owners[d], i) {
				owners[d] = append(owners[d], i)
			}
		}
	}
	groups := make(map[string]*Fault)
	for _, who := range owners {
		if len(who) < 2 {
			continue
		}
		key := fmt.Sprint(who)
		if groups[key] == nil {
			groups[key] = &Fault{Name: "draws", Machines: who, Detail: "the same random values"}
		}
	}
	for _, f := range groups {
		faults = append(faults, *f)
	}
	for i, m := range earlier {
		for _, d := range m.Draws {
			if who := owners[d]; len(who) > 0 {
				faults = append(faults, Fault{"draws", who, fmt.Sprintf("random values that machine %d drew before it was made to differ", i)})
				break
			}
		}
	}
	return faults
}
