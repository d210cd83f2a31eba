package run

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/redis/go-redis/v9"
)

// Bounds of a batch.
const (
	maxBatch      = 128             // commands in one
	maxBatched    = 32 << 10        // bytes of a command that shares a round trip; a larger one travels alone
	flightTimeout = 3 * readTimeout // of one round trip, whatever its callers wait
)

// batcher sends the commands of many callers in one round trip: what arrives while one is under way goes together in the next,
// so that trips get fuller the more there is to do. A command alone is sent at once. The order of commands of different callers is not kept. A command may be sent
// twice when a connection breaks, so only such may be given as can be repeated.
type batcher struct {
	send     func(ctx context.Context, cmds []redis.Cmder)
	life     context.Context
	routines *sync.WaitGroup

	mu      sync.Mutex
	waiting []*passenger
	shared  map[string]*passenger // of those waiting, by what they ask for
	flying  bool                  // a round trip is under way
}

// passenger is one command on its way.
type passenger struct {
	cmd  redis.Cmder
	what string        // what it asks for; empty: it is not shared
	gone bool          // nobody waits any more: it is not sent if it was not yet; guarded by the batcher
	done chan struct{} // closed when cmd has its answer

	command func(callers int) redis.Cmder // makes cmd when the round trip begins; nil: it is made
	callers int                           // who share it

	read  sync.Once // of what the answer says, for all who share it
	value any
	err   error
}

// reading is what f makes of the answer, which is asked once for all who share it.
func (p *passenger) reading(f func(redis.Cmder) (any, error)) (any, error) {
	p.read.Do(func() { p.value, p.err = f(p.cmd) })
	return p.value, p.err
}

// do sends a command and waits for its answer, at most until ctx ends; the command must not be looked at after that.
// Its error is the command's, or ErrUnavailable with ctx's: then the command may have been carried out, or may be yet.
func (b *batcher) do(ctx context.Context, cmd redis.Cmder) error {
	p := &passenger{cmd: cmd, done: make(chan struct{})}
	b.mu.Lock()
	b.board(p)
	b.mu.Unlock()
	err := p.wait(ctx)
	if ctx.Err() != nil {
		b.mu.Lock()
		p.gone = true
		b.mu.Unlock()
	}
	return err
}

// hgetall reads a hash, shared. Nobody may change the map.
func (b *batcher) hgetall(ctx context.Context, key string) (map[string]string, error) {
	p, _, err := b.share(ctx, key, func(int) redis.Cmder {
		return redis.NewMapStringStringCmd(context.WithoutCancel(ctx), "hgetall", key)
	})
	if err != nil {
		return nil, err
	}
	return p.cmd.(*redis.MapStringStringCmd).Val(), nil
}

// share sends one command for all who ask for the same, by what, before it is sent: its answer is as new as if each had asked
// alone. command makes it for so many callers; turn is which of them this one is, from 1. Nobody may change the answer.
func (b *batcher) share(ctx context.Context, what string, command func(callers int) redis.Cmder) (p *passenger, turn int, err error) {
	b.mu.Lock()
	p = b.shared[what]
	if p == nil {
		p = &passenger{what: what, command: command, done: make(chan struct{})}
		if b.shared == nil {
			b.shared = map[string]*passenger{}
		}
		b.shared[what] = p
		b.board(p)
	}
	p.callers++
	turn = p.callers
	b.mu.Unlock()
	if err := p.wait(ctx); err != nil {
		return nil, 0, err
	}
	return p, turn, nil
}

// board puts p into the next round trip, which begins now unless one is under way. The caller holds mu.
func (b *batcher) board(p *passenger) {
	if err := b.life.Err(); err != nil {
		if p.what != "" {
			delete(b.shared, p.what)
			p.cmd = p.command(1)
		}
		p.cmd.SetErr(fmt.Errorf("store closed: %w", err))
		close(p.done)
		return
	}
	b.waiting = append(b.waiting, p)
	if !b.flying {
		b.flying = true
		b.routines.Go(b.fly)
	}
}

// fly makes round trips as long as somebody waits for one.
func (b *batcher) fly() {
	for {
		b.mu.Lock()
		n := min(len(b.waiting), maxBatch)
		if n == 0 {
			b.flying = false
			b.mu.Unlock()
			return
		}
		aboard := make([]*passenger, 0, n)
		cmds := make([]redis.Cmder, 0, n)
		for _, p := range b.waiting[:n] {
			if p.what != "" {
				delete(b.shared, p.what)
				p.cmd = p.command(p.callers)
			}
			if !p.gone {
				aboard, cmds = append(aboard, p), append(cmds, p.cmd)
			}
		}
		b.waiting = slices.Delete(b.waiting, 0, n)
		b.mu.Unlock()
		if len(cmds) == 0 {
			continue
		}
		ctx, cancel := context.WithTimeout(b.life, flightTimeout)
		b.send(ctx, cmds)
		cancel()
		for _, p := range aboard {
			close(p.done)
		}
	}
}

// barrier returns when no round trip can begin any more; life has ended before.
func (b *batcher) barrier() {
	b.mu.Lock()
	defer b.mu.Unlock()
}

func (p *passenger) wait(ctx context.Context) error {
	select {
	case <-p.done:
		return p.cmd.Err()
	case <-ctx.Done():
		return fmt.Errorf("%w: %w", ErrUnavailable, ctx.Err())
	}
}

// pipeline sends commands in one round trip. Each has its own error.
func (s *Store) pipeline(ctx context.Context, cmds []redis.Cmder) {
	_, _ = s.rdb.Pipelined(ctx, func(p redis.Pipeliner) error { // the error is that of a command
		for _, c := range cmds {
			_ = p.Process(ctx, c) // queues it
		}
		return nil
	})
}

// evalBatched runs a script as Script.Run does, in a round trip with others.
func (s *Store) evalBatched(ctx context.Context, sc *script, keys []string, args []any) ([]any, error) {
	size := 0
	for _, k := range keys {
		size += len(k)
	}
	for _, a := range args {
		switch v := a.(type) {
		case string:
			size += len(v)
		case []byte:
			size += len(v)
		}
	}
	if size > maxBatched {
		return sc.Run(ctx, s.rdb, keys, args...).Slice()
	}
	cmd := sc.call(context.WithoutCancel(ctx), keys, args)
	err := s.batch.do(ctx, cmd)
	if redis.HasErrorPrefix(err, "NOSCRIPT") {
		return sc.Eval(ctx, s.rdb, keys, args...).Slice()
	}
	if err != nil {
		return nil, err
	}
	return cmd.Val(), nil
}

// evalShared runs a script that only reads, as eval does. Callers that give the same keys for the same round trip share
// the answer: its arguments may differ in the time only.
func (s *Store) evalShared(ctx context.Context, sc *script, keys []string, args ...any) (reply, error) {
	p, _, err := s.batch.share(ctx, sc.name+" "+strings.Join(keys, " "), func(int) redis.Cmder { return sc.call(context.WithoutCancel(ctx), keys, args) })
	if redis.HasErrorPrefix(err, "NOSCRIPT") {
		return s.eval(ctx, sc, keys, args...)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", sc.name, unavailable(err))
	}
	return p.cmd.(*redis.SliceCmd).Val(), nil
}

// call is the command that runs a script by its hash.
func (sc *script) call(ctx context.Context, keys []string, args []any) *redis.SliceCmd {
	all := make([]any, 0, 3+len(keys)+len(args))
	all = append(all, "evalsha", sc.Hash(), len(keys))
	for _, k := range keys {
		all = append(all, k)
	}
	return redis.NewSliceCmd(ctx, append(all, args...)...)
}
