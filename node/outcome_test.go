package node

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/ephemeral-run/ephemeral/node/guest"
	"github.com/ephemeral-run/ephemeral/vmm"
)

// ended is a machine that ends, for a reason.
type ended struct {
	done chan struct{}
	why  error
}

func (e ended) Done() <-chan struct{} { return e.done }
func (e ended) Err() error            { return e.why }

func TestABrokenConnectionIsExplainedByTheEndOfTheMachine(t *testing.T) {
	refused := errors.New("refused")
	for _, c := range []struct {
		name  string
		err   error
		after time.Duration // when the machine ends; 0: it lives on
		want  error
	}{
		{"lost, then ended", fmt.Errorf("worker: %w", guest.ErrLost), endingTime / 5, errMachineLost},
		{"not prepared, then ended", fmt.Errorf("prepare: %w", guest.ErrNotPrepared), endingTime / 5, errMachineLost},
		{"lost in a machine that lives", guest.ErrLost, 0, guest.ErrLost},
		{"not prepared in a machine that lives", guest.ErrNotPrepared, 0, guest.ErrNotPrepared},
		{"another error", refused, endingTime / 5, refused},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			m := ended{make(chan struct{}), vmm.ErrPanicked}
			if c.after > 0 {
				time.AfterFunc(c.after, func() { close(m.done) })
			}
			got := explain(c.err, m)
			if !errors.Is(got, c.want) {
				t.Errorf("explained as %v, want %v", got, c.want)
			}
			if lost := c.want == errMachineLost; errors.Is(got, vmm.ErrPanicked) != lost {
				t.Errorf("explained as %v, which is to tell how the machine ended: %t", got, lost)
			}
		})
	}
}
