// Package prepare makes a clone differ from its siblings before anything untrusted runs in it: clock, randomness of the
// kernel, names, addresses and the scratch directory.
//
// The agent itself was cloned while it ran: math/rand, the order of maps and os.MkdirTemp go on equally in every clone.
// Whatever has to differ comes from the kernel, after its reseed, through crypto/rand.
package prepare

import (
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ephemeral-run/ephemeral/guestagent/files"
)

// Identity is what the host gives a clone.
type Identity struct {
	Clock     time.Time // the host's wall clock; used when Step is 0
	Step      time.Duration
	Entropy   []byte // 32 to 256 bytes
	Hostname  string
	MachineID string
	MAC       string // empty: leave as it is
	Address   string // CIDR; empty: no address
}

// Bounds of the entropy, in bytes.
const (
	minEntropy = 32
	maxEntropy = 256
)

var (
	hostname  = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`) // RFC 1123, one label
	machineID = regexp.MustCompile(`^[0-9a-f]{32}$`)                       // machine-id(5)
)

// Check says what is wrong with an identity.
func (i Identity) Check() error {
	if err := checkClock(i.Clock, i.Step); err != nil {
		return err
	}
	if n := len(i.Entropy); n < minEntropy || n > maxEntropy {
		return fmt.Errorf("entropy of %d bytes, want %d to %d", n, minEntropy, maxEntropy)
	}
	if !hostname.MatchString(i.Hostname) {
		return fmt.Errorf("hostname %.70q is no RFC 1123 label", i.Hostname)
	}
	if !machineID.MatchString(i.MachineID) {
		return fmt.Errorf("machine id %.40q is not 32 hexadecimal digits", i.MachineID)
	}
	if i.MAC != "" {
		if hw, err := net.ParseMAC(i.MAC); err != nil || len(hw) != 6 || hw[0]&1 != 0 {
			return fmt.Errorf("MAC address %.40q is no unicast Ethernet address", i.MAC)
		}
	}
	if i.Address != "" {
		if _, _, err := net.ParseCIDR(i.Address); err != nil {
			return fmt.Errorf("address %.60q is no CIDR", i.Address)
		}
	}
	return nil
}

// ErrClock: a time that no clock is set to.
var ErrClock = errors.New("clock out of range")

func checkClock(to time.Time, step time.Duration) error {
	if step == 0 && (to.Before(time.Unix(1, 0)) || to.After(time.Unix(1<<33, 0))) {
		return fmt.Errorf("%w: %v", ErrClock, to)
	}
	return nil
}

// SetClock moves the wall clock by the step, or sets it where the step is 0. ErrClock: to that time it is not.
func SetClock(s System, to time.Time, step time.Duration) error {
	if err := checkClock(to, step); err != nil {
		return err
	}
	var err error
	if step != 0 {
		err = s.StepClock(step)
	} else {
		err = s.SetClock(to)
	}
	if err != nil {
		return fmt.Errorf("set clock: %w", err)
	}
	return nil
}

// System is what Prepare acts on; the machine's kernel, but for tests.
type System interface {
	SetClock(to time.Time) error
	StepClock(by time.Duration) error
	Reseed(entropy []byte) error
	SetNames(hostname, machineID string) error
	SetNetwork(mac, address string) error
}

// Prepare applies an identity and makes the scratch directory below dir for the owner. With reseeded false the clone
// shares its randomness with others and must not be used; err says why.
func Prepare(s System, i Identity, dir string, uid, gid int) (scratch string, reseeded bool, err error) {
	if err := i.Check(); err != nil {
		return "", false, err
	}
	if err := SetClock(s, i.Clock, i.Step); err != nil {
		return "", false, err
	}
	if err := s.Reseed(i.Entropy); err != nil {
		return "", false, fmt.Errorf("reseed: %w", err)
	}
	if err := s.SetNames(i.Hostname, i.MachineID); err != nil {
		return "", true, err
	}
	if err := s.SetNetwork(i.MAC, i.Address); err != nil {
		return "", true, err
	}
	scratch, err = makeScratch(dir, uid, gid)
	return scratch, true, err
}

const (
	nameLength = 6
	alphabet   = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
)

// randomName draws letters and digits, each as likely.
func randomName() (string, error) {
	name := make([]byte, 0, nameLength)
	var one [1]byte
	for len(name) < nameLength {
		if _, err := rand.Read(one[:]); err != nil {
			return "", err
		}
		if limit := 256 - 256%len(alphabet); int(one[0]) < limit {
			name = append(name, alphabet[int(one[0])%len(alphabet)])
		}
	}
	return string(name), nil
}

// makeScratch makes dir/ephemeral-run-XXXXXX/scratch, with out/ in it. The owner has the inner directory only, so that he cannot replace
// it by something else.
func makeScratch(dir string, uid, gid int) (string, error) {
	for range 10 {
		name, err := randomName()
		if err != nil {
			return "", fmt.Errorf("make scratch directory: %w", err)
		}
		outer := filepath.Join(dir, "ephemeral-run-"+name)
		if err := os.Mkdir(outer, 0o755); errors.Is(err, os.ErrExist) {
			continue
		} else if err != nil {
			return "", fmt.Errorf("make scratch directory: %w", err)
		}
		scratch := filepath.Join(outer, "scratch")
		if err := os.Mkdir(scratch, 0o755); err != nil {
			return "", fmt.Errorf("make scratch directory: %w", err)
		}
		out := filepath.Join(scratch, files.Out)
		if err := os.Mkdir(out, 0o755); err != nil {
			return "", fmt.Errorf("make scratch directory: %w", err)
		}
		if err := errors.Join(unix.Lchown(out, uid, gid), unix.Lchown(scratch, uid, gid)); err != nil {
			return "", fmt.Errorf("make scratch directory: %w", err)
		}
		return scratch, nil
	}
	return "", errors.New("make scratch directory: every name is taken")
}
