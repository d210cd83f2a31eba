package node

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/ephemeral-run/ephemeral/node/guest"
)

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
			ended := make(chan struct{})
			if c.after > 0 {
				time.AfterFunc(c.after, func() { close(ended) })
			}
			if got := explain(c.err, ended); !errors.Is(got, c.want) {
				t.Errorf("explained as %v, want %v", got, c.want)
			}
		})
	}
}
