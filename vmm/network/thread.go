package network

import (
	"errors"
	"runtime"

	"golang.org/x/sys/unix"
)

// ErrClosed says that the network was closed.
var ErrClosed = errors.New("network closed")

// thread is one operating-system thread that executes functions one after another. It is never given back to the
// scheduler: what a function changes on it (its network namespace) stays with it alone, and the kernel's parent-death
// signal, which is bound to the thread that forked, fires only when the thread was stopped or the process has ended.
type thread struct {
	calls chan call
	quit  chan struct{}
	gone  chan struct{} // closed when the goroutine has ended
}

type call struct {
	f   func() error
	err chan error
}

func startThread() *thread {
	t := &thread{calls: make(chan call), quit: make(chan struct{}), gone: make(chan struct{})}
	go t.run()
	return t
}

func (t *thread) run() {
	runtime.LockOSThread() // no unlock: the thread ends with the goroutine
	if unix.Gettid() == unix.Getpid() {
		// The first thread of a process stands for the process in places that matter here: its memory cgroup is that of
		// the process, and it cannot end alone. While this goroutine occupies it, the next one gets another thread.
		next := make(chan struct{})
		go func() {
			close(next)
			t.run()
		}()
		<-next
		runtime.UnlockOSThread()
		return
	}
	defer close(t.gone)
	for {
		select {
		case c := <-t.calls:
			c.err <- c.f()
		case <-t.quit:
			return
		}
	}
}

func (t *thread) do(f func() error) error {
	c := call{f: f, err: make(chan error, 1)}
	select {
	case t.calls <- c:
	case <-t.gone:
		return ErrClosed
	}
	select {
	case err := <-c.err:
		return err
	case <-t.gone:
		// f may have answered just before the thread ended.
		select {
		case err := <-c.err:
			return err
		default:
			return ErrClosed
		}
	}
}

// stop ends the thread; children that asked for a parent-death signal get it. Call it once.
func (t *thread) stop() {
	close(t.quit)
	<-t.gone
}
