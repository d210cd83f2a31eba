package guest

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"regexp"
	"time"

	"github.com/ephemeral-run/ephemeral/guestagent/proto"
)

// Identity is what makes a machine differ from its siblings, beside clock and randomness.
type Identity struct {
	Hostname  string // one label, RFC 1123
	MachineID string // 32 hexadecimal digits
	MAC       string // empty: as it is
	Address   string // CIDR; empty: none
}

// Prepared is a machine that is ready for untrusted work.
type Prepared struct {
	Scratch    string        // working directory inside the machine
	ClockError time.Duration // guest's clock minus the host's, as measured
}

// MaxClockError is how far the guest's clock may be from the host's.
const MaxClockError = 50 * time.Millisecond

const (
	entropySize = 64
	// goodRoundTrip is short enough to measure a clock by.
	goodRoundTrip = 20 * time.Millisecond
	// maxCorrections is how often a clock is set again that was measured badly, on a busy host.
	maxCorrections = 3
	// maxSamples and sampleTime bound the tries to get such a round trip on a busy host.
	maxSamples = 64
	sampleTime = 3 * time.Second
)

var scratchDir = regexp.MustCompile(`^/tmp/ephemeral-run-[A-Za-z0-9]{6}/scratch$`)

// Prepare makes a restored machine an individual, once. It fails closed: unless the agent confirms that the kernel's
// randomness was reseeded, and its clock is right, the error is ErrNotPrepared and the machine must not be used.
func (c *Client) Prepare(ctx context.Context, id Identity) (prepared Prepared, err error) {
	k, err := c.open(ctx, "prepare")
	if err != nil {
		return Prepared{}, err
	}
	defer k.close()
	return k.prepare(ctx, id)
}

// prepare is Client.Prepare over this connection.
func (k *call) prepare(ctx context.Context, id Identity) (prepared Prepared, err error) {
	err = k.do(ctx, "prepare", func(k *call) error {
		before, err := k.sampleClock(ctx)
		if err != nil {
			return err
		}
		request := &proto.PrepareRequest{
			ClockStepNanos: step(before), Entropy: make([]byte, entropySize),
			Hostname: id.Hostname, MachineId: id.MachineID, Mac: id.MAC, Address: id.Address,
		}
		if _, err := rand.Read(request.Entropy); err != nil {
			return &callerError{fmt.Errorf("draw entropy: %w", err)}
		}
		sent := time.Now()
		request.ClockUnixNanos = sent.UnixNano()
		k.guard.unary()
		response, err := k.agent.Prepare(ctx, request)
		if err != nil {
			return err
		}
		after := newSample(sent, time.Now(), response.ClockUnixNanos)
		if !response.Reseeded {
			return fmt.Errorf("%w: randomness not reseeded", ErrNotPrepared)
		}
		if !scratchDir.MatchString(response.Scratch) {
			return fmt.Errorf("%w: scratch directory %.100q", ErrNotPrepared, response.Scratch)
		}
		if after, err = k.correctClock(ctx, after); err != nil {
			return err
		}
		prepared = Prepared{Scratch: response.Scratch, ClockError: after.ahead}
		return nil
	})
	if refused := new(RefusedError); errors.As(err, &refused) {
		err = fmt.Errorf("%w: %w", ErrNotPrepared, err)
	}
	return prepared, err
}

// setClock moves the guest's clock by the step, or sets it to the host's where that is 0.
func (k *call) setClock(ctx context.Context, step int64) (sample, error) {
	sent := time.Now()
	k.guard.unary()
	response, err := k.agent.SetClock(ctx, &proto.SetClockRequest{ClockUnixNanos: sent.UnixNano(), ClockStepNanos: step})
	if err != nil {
		return sample{}, err
	}
	return newSample(sent, time.Now(), response.ClockUnixNanos), nil
}

// correctClock measures and sets the clock, which looked like s when it was set, until it is known to be right to
// MaxClockError. Where no measurement is good enough to tell, the best one has to say so at least; else: ErrNotPrepared.
func (k *call) correctClock(ctx context.Context, s sample) (sample, error) {
	for n := 0; s.off() > MaxClockError; n++ {
		var err error
		if s.roundTrip > goodRoundTrip {
			if s, err = k.sampleClock(ctx); err != nil {
				return s, err
			}
		}
		switch right := s.ahead.Abs() <= MaxClockError; {
		case n == maxCorrections && right:
			return s, nil
		case n == maxCorrections:
			return s, fmt.Errorf("%w: clock is %v ahead of the host's", ErrNotPrepared, s.ahead)
		case s.off() > MaxClockError:
			if s, err = k.setClock(ctx, step(s)); err != nil {
				return s, err
			}
		}
	}
	return s, nil
}

// sample is one look at the guest's clock.
type sample struct {
	ahead     time.Duration // of the host's, if the answer was given half-way
	roundTrip time.Duration // the error of ahead is half of it at most
}

// off is how far the guest's clock is off the host's at the most. A guest may tell a time so absurd that the sum overflows.
func (s sample) off() time.Duration { return max(s.ahead.Abs(), s.ahead.Abs()+s.roundTrip/2) }

func newSample(sent, received time.Time, guestNanos int64) sample {
	roundTrip := received.Sub(sent)
	return sample{ahead: time.Unix(0, guestNanos).Sub(sent.Add(roundTrip / 2)), roundTrip: roundTrip}
}

// step is how far the guest's clock has to be moved. 0 would tell the agent that nothing was measured.
func step(s sample) int64 {
	if s.ahead == 0 {
		return 1
	}
	return int64(-s.ahead)
}

// sampleClock asks for the guest's clock, again while round trips are too long to tell, and returns the best.
func (k *call) sampleClock(ctx context.Context) (best sample, err error) {
	began := time.Now()
	for i := range maxSamples {
		sent := time.Now()
		k.guard.unary()
		response, err := k.agent.Ping(ctx, &proto.PingRequest{})
		if err != nil {
			return sample{}, err
		}
		s := newSample(sent, time.Now(), response.ClockUnixNanos)
		if i == 0 || s.roundTrip < best.roundTrip {
			best = s
		}
		if best.roundTrip <= goodRoundTrip || time.Since(began) > sampleTime {
			break
		}
	}
	return best, nil
}
