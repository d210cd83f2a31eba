package replay

import (
	"context"
	"errors"
	"testing"
	"time"
)

// machine is pretended: it takes the time of one.
type machine struct{ done chan struct{} }

func (m *machine) Done() <-chan struct{} { return m.done }

func (m *machine) Close() error {
	time.Sleep(5 * time.Millisecond)
	close(m.done)
	return nil
}

// Machines of which every fourth takes twice as long: the means would not do.
func TestPredictsPretendedMachines(t *testing.T) {
	n := 0
	o, err := Run(t.Context(), func(context.Context) (*machine, error) {
		d := 40 * time.Millisecond
		if n++; n%4 == 0 {
			d *= 2
		}
		time.Sleep(d)
		return &machine{make(chan struct{})}, nil
	}, 60, 20*time.Millisecond)
	if err != nil {
		t.Fatal(err)
	}
	t.Log(o)
	if !o.Holds() {
		t.Error("the prediction does not hold: ", o)
	}
}

func TestHolds(t *testing.T) {
	good := Outcome{Missed: 0.5, Predicted: 0.45, WaitP95: time.Second, PredictedBy: 1200 * time.Millisecond}
	if !good.Holds() {
		t.Errorf("%v does not hold", good)
	}
	for name, spoil := range map[string]func(*Outcome){
		"misses":             func(o *Outcome) { o.Predicted = 0.65 },
		"wait":               func(o *Outcome) { o.PredictedBy = 650 * time.Millisecond },
		"nothing to predict": func(o *Outcome) { o.Missed, o.Predicted = 0, 0 },
	} {
		bad := good
		if spoil(&bad); bad.Holds() {
			t.Errorf("%s: %v holds", name, bad)
		}
	}
}

func TestEndsWithItsContext(t *testing.T) {
	gone := errors.New("caller left")
	ctx, cancel := context.WithCancelCause(t.Context())
	time.AfterFunc(50*time.Millisecond, func() { cancel(gone) })
	_, err := Run(ctx, func(ctx context.Context) (*machine, error) {
		<-ctx.Done()
		return nil, context.Cause(ctx)
	}, 10, time.Millisecond)
	if !errors.Is(err, gone) {
		t.Errorf("got %v", err)
	}
}
