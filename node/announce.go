package node

import (
	"context"
	"log/slog"
	"time"

	"github.com/ephemeral-run/ephemeral/run"
)

// announceTime bounds one announcement.
const announceTime = 2 * time.Second

// Announce tells the store what a node says of itself, every run.NodeInterval until ctx ends, and then that it is gone.
// A failure is logged and costs no more than that operators see an old answer.
func Announce(ctx context.Context, store *run.Store, describe func() run.Node, log *slog.Logger) {
	try := func(what string, f func(context.Context) error) {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), announceTime)
		defer cancel()
		if err := f(ctx); err != nil {
			log.Debug(what, "error", err)
		}
	}
	for {
		try("cannot announce the node", func(c context.Context) error { return store.Announce(c, describe()) })
		if !sleepUntil(ctx, time.Now().Add(run.NodeInterval)) {
			break
		}
	}
	try("cannot retire the node", func(c context.Context) error { return store.Retire(c, describe().ID) })
}

// Running is how many runs the node carries out now.
func (r *Runner) Running() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.cancels)
}
