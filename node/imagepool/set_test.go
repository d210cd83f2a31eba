package imagepool

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ephemeral-run/ephemeral/node"
	"github.com/ephemeral-run/ephemeral/vmm/provision"
)

var _ node.Pool = (*Set)(nil)

func TestParse(t *testing.T) {
	got, err := Parse([]string{"base", " data:1024"})
	if err != nil || !slices.Equal(got, []Wanted{{Image: "base"}, {Image: "data", MemoryMiB: 1024}}) {
		t.Errorf("%v, %v", got, err)
	}
	for list, want := range map[string]string{
		"": "image name", "base,base": "twice", "base,base:64": "twice", "Base": "image name", "../x": "image name", "base:": "memory",
		"base:63": "memory", "base:262145": "memory", "base:1:2": "memory", "base:-5": "memory",
	} {
		if _, err := Parse(strings.Split(list, ",")); err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "EPHEMERAL_IMAGES") {
			t.Errorf("%q: %v, want %q", list, err, want)
		}
	}
	if _, err := Parse(nil); err == nil {
		t.Error("no image at all is accepted")
	}
	if _, err := Parse(make([]string, maxImages+1)); err == nil || !strings.Contains(err.Error(), "65") {
		t.Errorf("too many images: %v", err)
	}
}

// fakePool counts what is asked of it, with a template that comes later.
type fakePool struct {
	mu                      sync.Mutex
	unready                 error // the keeper's
	broken                  error // the pool's
	claimed, settled, freed int
}

func (p *fakePool) Claim(context.Context) (*provision.Machine, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.claimed++
	return &provision.Machine{}, nil
}
func (p *fakePool) Settled(*provision.Machine)  { p.settled++ }
func (p *fakePool) Released(*provision.Machine) { p.freed++ }
func (p *fakePool) Ready() error                { return p.broken }

func (p *fakePool) set(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.unready = err
}

// keeper is the part of the pool that keeps its template.
type keeper struct{ *fakePool }

func (k keeper) Ready() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.unready
}

func newSet(images ...string) (*Set, map[string]*fakePool) {
	s, pools := New(), map[string]*fakePool{}
	for _, i := range images {
		pools[i] = &fakePool{}
		s.Add(i, keeper{pools[i]}, pools[i])
	}
	return s, pools
}

// A claim goes to the pool of its image, and so does what becomes of the machine.
func TestClaimsGoToTheirPool(t *testing.T) {
	s, pools := newSet("base", "data")
	m, err := s.Claim(t.Context(), "data")
	if err != nil {
		t.Fatal(err)
	}
	other, err := s.Claim(t.Context(), "base")
	if err != nil {
		t.Fatal(err)
	}
	s.Settled(m)
	s.Released(m)
	s.Released(m) // is nobody's any more
	if d := pools["data"]; d.claimed != 1 || d.settled != 1 || d.freed != 1 {
		t.Errorf("data: %d claimed, %d settled, %d freed", d.claimed, d.settled, d.freed)
	}
	if b := pools["base"]; b.claimed != 1 || b.settled+b.freed != 0 {
		t.Errorf("base: %d claimed, %d settled, %d freed", b.claimed, b.settled, b.freed)
	}
	s.Released(other)
	if len(s.owners) != 0 {
		t.Errorf("%d machines are remembered", len(s.owners))
	}
	var none *node.ImageError
	if _, err := s.Claim(t.Context(), "nope"); !errors.As(err, &none) || none.Image != "nope" {
		t.Errorf("unknown image: %v", err)
	}
}

func TestClaimWaitsForTheFirstTemplate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, pools := newSet("base", "data")
		making := &provision.KeeperError{Err: errors.New("is being made")}
		pools["data"].set(making)
		done := make(chan error, 1)
		claim := func(ctx context.Context) {
			go func() {
				_, err := s.Claim(ctx, "data")
				done <- err
			}()
		}
		claim(t.Context())
		time.Sleep(10 * time.Second)
		select {
		case err := <-done:
			t.Fatalf("claimed without a template: %v", err)
		default:
		}
		ctx, cancel := context.WithCancelCause(t.Context())
		claim(ctx)
		why := errors.New("cancelled by request")
		cancel(why)
		if err := <-done; !errors.Is(err, why) {
			t.Errorf("cancelled: %v", err)
		}
		pools["data"].set(&provision.KeeperError{Err: errors.New("disk full"), At: time.Now().Add(time.Minute)})
		var none *node.ImageError
		if err := <-done; !errors.As(err, &none) || !strings.Contains(err.Error(), "disk full") {
			t.Errorf("a template that cannot be made: %v", err)
		}
		pools["data"].set(nil)
		if _, err := s.Claim(t.Context(), "data"); err != nil {
			t.Error(err)
		}
		pools["data"].set(making) // the template is made anew: the pool may still have machines
		if _, err := s.Claim(t.Context(), "data"); err != nil {
			t.Error(err)
		}
	})
}

func TestReadyWithOneOfMany(t *testing.T) {
	s, pools := newSet("base", "data")
	pools["base"].unready, pools["data"].broken = errors.New("no template"), errors.New("circuit open")
	if err := s.Ready(); err == nil || !strings.Contains(err.Error(), "no template") || !strings.Contains(err.Error(), "circuit open") {
		t.Errorf("%v", err)
	}
	pools["data"].broken = nil
	if err := s.Ready(); err != nil {
		t.Error(err)
	}
}

func TestTogetherNotMoreThanTheNode(t *testing.T) {
	s, _ := newSet("base", "data")
	var told []int
	s.Limit(6, func(n int) { told = append(told, n) })
	s.Take("base", 4)
	s.Take("data", 4)
	s.Take("base", 0)
	s.Take("data", 0)
	if want := []int{0, 4, 6, 4, 0}; !slices.Equal(told, want) {
		t.Errorf("told %v, want %v", told, want)
	}
}

// The node takes runs of the images whose pools allow any.
func TestAble(t *testing.T) {
	s, _ := newSet("base", "data", "tools")
	check := func(want ...string) {
		t.Helper()
		if got := s.Able(); !slices.Equal(got, want) {
			t.Errorf("able %v, want %v", got, want)
		}
	}
	check()
	s.Take("tools", 1)
	s.Take("base", 4)
	check("base", "tools")
	s.Take("base", 0) // its template cannot be made any more
	s.Take("data", 2)
	check("data", "tools")
}
