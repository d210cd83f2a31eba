package kvmbox

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
)

// Count is what became of a driver's tests. Only tests without subtests are counted.
type Count struct {
	Passed  int      `json:"passed"`
	Failed  int      `json:"failed"`
	LeftOut int      `json:"left_out"`
	Rounds  int      `json:"rounds"`  // how often the conformance suite has run; the counts are of all rounds
	Reasons []string `json:"reasons"` // why tests were left out, and what failed
}

// merge adds a further round.
func (c *Count) merge(more Count) {
	c.Passed += more.Passed
	c.Failed += more.Failed
	c.LeftOut += more.LeftOut
	c.Rounds += more.Rounds
	c.Reasons = append(c.Reasons, more.Reasons...)
}

// leaveOut notes that a driver's tests were not run at all.
func (c *Count) leaveOut(reason string) {
	c.LeftOut++
	c.Reasons = append(c.Reasons, reason)
}

func (c *Count) fail(reason string) {
	c.Failed++
	c.Reasons = append(c.Reasons, reason)
}

// event is one line that test2json writes: go doc test2json.
type event struct {
	Action  string
	Test    string
	Elapsed float64 // seconds
	Output  string
}

// Bounds on what is read and kept of tests, in bytes.
const (
	maxEvent  = 1 << 20
	maxOutput = 64 << 10 // of one test, from its begin
	maxReason = 300
)

// state of a test that has begun.
type state struct {
	result string // pass, fail or skip; empty while it runs
	parent bool   // has subtests
	output strings.Builder
}

// tally reads events to their end and counts. On w each test has a line when it ends, with its output if it did not pass.
func tally(r io.Reader, w io.Writer) (Count, error) {
	count := Count{Reasons: []string{}}
	tests := map[string]*state{}
	var order []string
	begun := func(name string) *state {
		if tests[name] == nil {
			tests[name] = &state{}
			order = append(order, name)
		}
		return tests[name]
	}
	scan := bufio.NewScanner(r)
	scan.Buffer(nil, maxEvent)
	for scan.Scan() {
		var e event
		if err := json.Unmarshal(scan.Bytes(), &e); err != nil {
			return count, fmt.Errorf("read test events: %w", err)
		}
		t := begun(e.Test)
		switch e.Action {
		case "run":
			for name := e.Test; strings.Contains(name, "/"); {
				name = name[:strings.LastIndexByte(name, '/')]
				begun(name).parent = true
			}
		case "output":
			if t.output.Len()+len(e.Output) <= maxOutput {
				t.output.WriteString(e.Output)
			}
		case "pass", "fail", "skip":
			t.result = e.Action
			if e.Test != "" {
				show(w, e, t)
			}
		}
	}
	if err := scan.Err(); err != nil {
		return count, fmt.Errorf("read test events: %w", err)
	}
	count.add(order, tests, w)
	return count, nil
}

// show writes the line of a test that has ended.
func show(w io.Writer, e event, t *state) {
	word := map[string]string{"pass": "ok", "fail": "FAIL", "skip": "left out"}[t.result]
	fmt.Fprintf(w, "%-8s  %s  %.1fs\n", word, e.Test, e.Elapsed)
	if t.result != "pass" {
		fmt.Fprint(w, t.output.String())
	}
	t.keepReason()
}

// keepReason keeps of a test's output what it said itself.
func (t *state) keepReason() {
	var said []string
	for line := range strings.Lines(t.output.String()) {
		line = strings.TrimSpace(line)
		if line != "" && !strings.HasPrefix(line, "===") && !strings.HasPrefix(line, "---") {
			said = append(said, line)
		}
	}
	t.output.Reset()
	reason := strings.Join(said, "; ")
	t.output.WriteString(strings.ToValidUTF8(reason[:min(len(reason), maxReason)], ""))
}

// add counts the tests. Of a parent that fails although its subtests passed, the failure is its own.
func (c *Count) add(order []string, tests map[string]*state, w io.Writer) {
	failedBelow := func(name string) bool {
		return slices.ContainsFunc(order, func(other string) bool {
			return strings.HasPrefix(other, name+"/") && tests[other].result != "pass" && tests[other].result != "skip"
		})
	}
	for _, name := range order {
		t := tests[name]
		switch {
		case name == "" || t.parent && (t.result == "pass" || failedBelow(name)):
		case t.result == "pass":
			c.Passed++
		case t.result == "skip":
			c.leaveOut(name + ": " + t.output.String())
		case t.result == "fail":
			c.fail(name + ": " + t.output.String())
		default:
			c.fail(name + ": did not end")
			fmt.Fprintf(w, "FAIL      %s  did not end\n%s", name, t.output.String())
		}
	}
	// Without a test to blame, as when it dies, the program's own last words are all there is.
	if whole := tests[""]; whole != nil && whole.result == "fail" && c.Failed == 0 {
		fmt.Fprint(w, whole.output.String())
		whole.keepReason()
		c.fail("the tests' program: " + whole.output.String())
	}
}
