package node

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/ephemeral-run/ephemeral/run"
	"github.com/ephemeral-run/ephemeral/vmm/pool"
	"github.com/ephemeral-run/ephemeral/vmm/provision"
)

// brokenPool cannot make machines for now.
type brokenPool struct{ Pool }

func (brokenPool) Claim(context.Context, string) (*provision.Machine, error) {
	return nil, fmt.Errorf("claim machine: %w", &pool.CircuitError{Reason: errors.New("no tun device"), Until: time.Now().Add(time.Minute)})
}

// TestARunGoesBackWhenNoMachineCanBeMade: it waits in the queue for this node to be mended, or for another one, and costs nothing.
func TestARunGoesBackWhenNoMachineCanBeMade(t *testing.T) {
	r, _, l := leased(t)
	r.Pool = brokenPool{}
	r.Execute(t.Context(), l)
	got, err := r.Store.Get(t.Context(), l.Org, l.Run)
	if err != nil {
		t.Fatal(err)
	}
	if got.State != run.Queued || got.Money.Charged != 0 {
		t.Errorf("the run is %s (%+v), charged %d; want queued", got.State, got.Error, got.Money.Charged)
	}
}
