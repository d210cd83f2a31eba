package run

import (
	"encoding/json"
	"fmt"
	"math"
	"time"
)

// outcome is what the record keeps of how a run ended, beside money and times. Contents have keys of their own.
type outcome struct {
	Usage    Usage           `json:"usage"`
	Stages   []stage         `json:"stages,omitempty"`
	Egress   Egress          `json:"egress"`
	Attempts *EgressAttempts `json:"egress_attempts,omitempty"`
	Files    *Files          `json:"files,omitempty"`
	Error    *Error          `json:"error,omitempty"`
	Result   *resultMeta     `json:"result,omitempty"`
}

// stage is a Stage in whole microseconds, so that sums are exact.
type stage struct {
	Name string `json:"name"`
	Us   int64  `json:"us"`
}

// resultMeta is a Result without its contents.
type resultMeta struct {
	Output   bool        `json:"output,omitempty"` // there was one
	ExitCode *int        `json:"exit_code,omitempty"`
	Stdout   *streamMeta `json:"stdout,omitempty"`
	Stderr   *streamMeta `json:"stderr,omitempty"`
}

type streamMeta struct {
	Bytes     int64 `json:"bytes"`
	Truncated bool  `json:"truncated,omitempty"`
}

// newOutcome is what to keep of how a run ended. Without content no output is kept, not even that there was one.
func newOutcome(o Outcome, zdr bool) outcome {
	kept := outcome{Usage: o.Usage, Egress: o.Egress, Attempts: o.Attempts, Files: o.Files, Error: o.Error}
	for _, st := range o.Stages {
		kept.Stages = append(kept.Stages, stage{Name: st.Name, Us: stageMicros(st.Ms)})
	}
	if zdr {
		kept.Error, kept.Attempts = o.Error.bare(), nil
	}
	if o.Result == nil {
		return kept
	}
	kept.Result = &resultMeta{ExitCode: o.Result.ExitCode}
	if zdr {
		return kept
	}
	kept.Result.Output = o.Result.Output != ""
	meta := func(st *Stream) *streamMeta {
		if st == nil {
			return nil
		}
		return &streamMeta{Bytes: st.Bytes, Truncated: st.Truncated}
	}
	kept.Result.Stdout, kept.Result.Stderr = meta(o.Result.Stdout), meta(o.Result.Stderr)
	return kept
}

// sum is how long the stages took together, in microseconds.
func (o outcome) sum() (us int64) {
	for _, st := range o.Stages {
		us += st.Us
	}
	return us
}

// stageMicros turns milliseconds into whole microseconds; what is no duration counts as none.
func stageMicros(ms float64) int64 {
	us := math.Round(ms * 1000)
	if !(us > 0) || us > 1e15 {
		return 0
	}
	return int64(us)
}

// shownFields are those fields of a record that say all that is shown of a run which has not ended; the state is the first.
var shownFields = [...]string{"state", "org", "request", "queued_us", "reserved", "charged", "model", "web", "compute", "split",
	"started_us", "node", "machine", "image", "isolation"}

// record reads a record that a script answered with as the i-th value (readrun in lib.lua): the values of shownFields, or
// names and values of all fields.
func (r reply) record(i int) map[string]string {
	if i >= len(r) {
		return nil
	}
	values, _ := r[i].([]any)
	if len(values) != len(shownFields) { // an odd number
		return r.fields(i)
	}
	m := make(map[string]string, len(values))
	for j, v := range values {
		if text, ok := v.(string); ok {
			m[shownFields[j]] = text
		}
	}
	return m
}

// sameSpec is a request whose encoded form is known, so that a record with the same one need not be decoded.
type sameSpec struct {
	encoded string
	spec    Spec
}

// decodeRun builds a run from the fields of its record. Contents are not in it: see readContents.
func decodeRun(id ID, f map[string]string) (Run, error) { return decodeRunWith(id, f, sameSpec{}) }

func decodeRunWith(id ID, f map[string]string, same sameSpec) (Run, error) {
	d := decoder{f: f}
	r := Run{ID: id, Org: f["org"], State: State(f["state"]), QueuedAt: d.time("queued_us"),
		StartedAt: d.optional("started_us"), EndedAt: d.optional("ended_us"), Node: f["node"], Machine: f["machine"],
		Image: f["image"], Isolation: f["isolation"], ContentUntil: d.optional("until_us"), Erased: f["erased"] == "1",
		Money: Money{Reserved: d.money("reserved"), Charged: d.money("charged"), Model: d.money("model"), Web: d.money("web"), Compute: d.money("compute")}}
	if r.State.Terminal() {
		r.Money.Released = d.money("released")
	}
	if d.err != nil {
		return Run{}, fmt.Errorf("record of %s: %w", id, d.err)
	}
	r.Request = &same.spec
	if request := f["request"]; request != same.encoded || request == "" {
		r.Request = &Spec{}
		if err := json.Unmarshal([]byte(request), r.Request); err != nil {
			return Run{}, fmt.Errorf("record of %s: request: %w", id, err)
		}
	}
	if r.State.Terminal() {
		if err := r.decodeOutcome(f["outcome"], d.optional("taken_us")); err != nil {
			return Run{}, fmt.Errorf("record of %s: %w", id, err)
		}
	}
	return r, nil
}

// decodeOutcome fills in how the run ended. taken is when a node took it, nil if none did.
func (r *Run) decodeOutcome(raw string, taken *time.Time) error {
	var o outcome
	if err := json.Unmarshal([]byte(raw), &o); err != nil {
		return fmt.Errorf("outcome: %w", err)
	}
	if r.EndedAt == nil {
		return fmt.Errorf("state %s without an end", r.State)
	}
	r.Usage, r.Egress, r.EgressAttempts, r.Files, r.Error = o.Usage, o.Egress, o.Attempts, o.Files, o.Error
	r.Stages = stagesOf(o, r.EndedAt.Sub(r.QueuedAt).Microseconds(), taken, r.QueuedAt)
	if m := o.Result; m != nil {
		r.Result = &Result{ExitCode: m.ExitCode, Stdout: m.Stdout.stream(), Stderr: m.Stderr.stream()}
	}
	return nil
}

// stagesOf names every microsecond of a run's wall time. Of a run that nobody could report on only the time in the
// queue is known. What the stages do not name is settlement.
func stagesOf(o outcome, wall int64, taken *time.Time, queued time.Time) []Stage {
	known := o.Stages
	if len(known) == 0 {
		queue := wall
		if taken != nil {
			queue = min(max(taken.Sub(queued).Microseconds(), 0), wall)
		}
		known = []stage{{Name: "queue", Us: queue}}
		o.Stages = known
	}
	stages := make([]Stage, 0, len(known)+1)
	for _, st := range known {
		stages = append(stages, Stage{Name: st.Name, Ms: float64(st.Us) / 1000})
	}
	return append(stages, Stage{Name: "settle", Ms: float64(max(wall-o.sum(), 0)) / 1000})
}

func (m *streamMeta) stream() *Stream {
	if m == nil {
		return nil
	}
	return &Stream{Bytes: m.Bytes, Truncated: m.Truncated}
}

// decodeSpec reads a spec as stored.
func decodeSpec(raw string) (sp Spec, err error) {
	if err := json.Unmarshal([]byte(raw), &sp); err != nil {
		return Spec{}, fmt.Errorf("stored spec: %w", err)
	}
	return sp, nil
}

// bareOutcome is a stored outcome without content.
func bareOutcome(raw string) (string, error) {
	var o outcome
	if err := json.Unmarshal([]byte(raw), &o); err != nil {
		return "", fmt.Errorf("stored outcome: %w", err)
	}
	o.Error, o.Attempts = o.Error.bare(), nil
	if o.Result != nil {
		o.Result = &resultMeta{ExitCode: o.Result.ExitCode}
	}
	return mustEncode(o), nil
}
