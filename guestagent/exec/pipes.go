package exec

import (
	"fmt"
	"math"
	"os"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// quietFor is how long the pipes must be silent, once the command itself has ended, to count as drained: processes
	// left in the background hold them open for as long as they live.
	quietFor = 100 * time.Millisecond
	// graceLimit ends the wait for one that never falls silent.
	graceLimit = time.Second
	gracePoll  = 5 * time.Millisecond
)

// pipes are the standard streams of one command.
type pipes struct {
	child          []*os.File // descriptors 0, 1, 2 of the command
	stdin          *os.File   // our ends; nil without input
	stdout, stderr *os.File   // stderr is nil when combined
}

func newPipes(spec *Spec) (p *pipes, err error) {
	p = &pipes{}
	defer func() {
		if err != nil {
			p.close()
			p.closeChild()
			err = fmt.Errorf("make pipes: %w", err)
		}
	}()
	input, err := p.input(spec)
	if err != nil {
		return p, err
	}
	p.child = append(p.child, input)
	var output *os.File
	if p.stdout, output, err = pipe(true); err != nil {
		return p, err
	}
	p.child = append(p.child, output)
	if spec.Combined {
		p.child = append(p.child, output)
		return p, nil
	}
	var errors *os.File
	if p.stderr, errors, err = pipe(true); err != nil {
		return p, err
	}
	p.child = append(p.child, errors)
	return p, nil
}

func (p *pipes) input(spec *Spec) (*os.File, error) {
	if spec.Stdin == nil {
		return os.Open(os.DevNull)
	}
	var child *os.File
	var err error
	p.stdin, child, err = pipe(false)
	return child, err
}

// pipeSize is what an output pipe holds, so that a command can go on while what it wrote is on its way.
const pipeSize = 2 * ChunkSize

// pipe makes a pipe of which our end is polled and the child's end blocks, as programs expect.
func pipe(read bool) (ours, childs *os.File, err error) {
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_CLOEXEC); err != nil {
		return nil, nil, err
	}
	our, child := fds[0], fds[1]
	if read {
		_, _ = unix.FcntlInt(uintptr(our), unix.F_SETPIPE_SZ, pipeSize) // where it may not grow, it is as it was
	} else {
		our, child = child, our
	}
	if err := unix.SetNonblock(our, true); err != nil {
		_ = unix.Close(our)
		_ = unix.Close(child)
		return nil, nil, err
	}
	return os.NewFile(uintptr(our), "pipe"), os.NewFile(uintptr(child), "pipe"), nil
}

func (p *pipes) closeChild() {
	for _, f := range p.child {
		_ = f.Close()
	}
	p.child = nil
}

func (p *pipes) close() {
	for _, f := range []*os.File{p.stdin, p.stdout, p.stderr} {
		if f != nil {
			_ = f.Close()
		}
	}
}

// pumps carry a command's streams while it runs.
type pumps struct {
	pipes          *pipes
	stdout, stderr *pump
	drained        chan struct{} // closed when both have ended
	inputEnd       chan struct{} // closed to end the input
	inputDone      chan struct{} // closed when it has ended
	broken         atomic.Bool
}

func startPumps(p *pipes, spec *Spec, start time.Time) *pumps {
	s := &pumps{pipes: p, drained: make(chan struct{}), inputEnd: make(chan struct{}), inputDone: make(chan struct{})}
	s.stdout = newPump(p.stdout, Stdout, spec, start)
	go s.stdout.run()
	s.stderr = newPump(p.stderr, Stderr, spec, start)
	if p.stderr != nil {
		go s.stderr.run()
	} else {
		close(s.stderr.done)
	}
	go func() {
		<-s.stdout.done
		<-s.stderr.done
		close(s.drained)
	}()
	if p.stdin != nil {
		go s.feed(spec)
	} else {
		close(s.inputDone)
	}
	return s
}

// feed writes the input. When the command reads no more, the rest is taken and dropped, so that the caller never hangs.
func (s *pumps) feed(spec *Spec) {
	defer close(s.inputDone)
	defer s.pipes.stdin.Close()
	for {
		select {
		case <-s.inputEnd:
			return
		case chunk, more := <-spec.Stdin:
			if !more {
				return
			}
			if _, err := s.pipes.stdin.Write(chunk); err != nil {
				s.broken.Store(true)
			}
			if spec.Taken != nil {
				spec.Taken()
			}
		}
	}
}

func (s *pumps) inputBroken() bool { return s.broken.Load() }

// grace gives what the command left running a moment to finish what it was writing.
func (s *pumps) grace() {
	ended := time.Now()
	for {
		select {
		case <-s.drained:
			return
		case <-time.After(gracePoll):
		}
		quiet := min(s.stdout.quietSince(ended), s.stderr.quietSince(ended))
		if quiet > quietFor || time.Since(ended) > graceLimit {
			return
		}
	}
}

// quietSince is for how long a stream has been silent since the moment; an ended stream is silent for ever.
func (p *pump) quietSince(moment time.Time) time.Duration {
	if p.ended() {
		return math.MaxInt64
	}
	return min(p.quiet(), time.Since(moment))
}

// finish takes what is left in the pipes of a command of which no process lives. A descriptor that was handed to a
// process outside of the command's group may still hold one open; that is cut off when it falls silent.
func (s *pumps) finish() {
	close(s.inputEnd)
	if s.pipes.stdin != nil {
		_ = s.pipes.stdin.SetWriteDeadline(time.Unix(1, 0))
	}
	<-s.inputDone
	emptied := time.Now()
	for _, p := range []*pump{s.stdout, s.stderr} {
		for !p.ended() {
			select {
			case <-p.done:
			case <-time.After(gracePoll):
			}
			if p.quietSince(emptied) > quietFor {
				_ = p.file.SetReadDeadline(time.Unix(1, 0))
				<-p.done
			}
		}
	}
	<-s.drained
}
