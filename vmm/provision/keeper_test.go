package provision

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ephemeral-run/ephemeral/images"
	"github.com/ephemeral-run/ephemeral/vmm"
)

// keeping runs a keeper on the stage until the test ends.
type keeping struct {
	*Keeper
	s *stage
	p *Provisioner

	mu    sync.Mutex
	image images.Image
	err   error // of opening the image
	swaps []vmm.Template
}

func keep(t *testing.T, s *stage) *keeping {
	dir := dataDir(t)
	k := &keeping{s: s, p: open(t, s, config(dir)), image: image(t, dir)}
	k.Keeper = k.p.Keeper(func() (*images.Held, error) {
		k.mu.Lock()
		defer k.mu.Unlock()
		return &images.Held{Image: k.image}, k.err
	}, k.p.config.Shape(), nil, func(tmpl vmm.Template) {
		k.mu.Lock()
		defer k.mu.Unlock()
		k.swaps = append(k.swaps, tmpl)
	})
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() { defer close(ended); k.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-ended })
	return k
}

func (k *keeping) set(f func()) {
	k.mu.Lock()
	defer k.mu.Unlock()
	f()
}

func (k *keeping) made() int {
	k.mu.Lock()
	defer k.mu.Unlock()
	return len(k.swaps)
}

// A first template that fails is tried again, ever more seldom, and the reason and the next time are told meanwhile.
func TestKeeperTriesAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStage()
		s.fail["boot"] = errors.New("no CPU to spare")
		k := keep(t, s)
		synctest.Wait()
		_, err := k.Create(t.Context())
		var told *KeeperError
		if !errors.As(err, &told) || !strings.Contains(err.Error(), "no CPU to spare") || told.RetryAfter() != keeperBase {
			t.Fatalf("told %v", err)
		}
		time.Sleep(10 * time.Minute)
		synctest.Wait()
		// 1 + 2 + 4 + ... + 32 seconds, then every minute.
		if n := s.count("boot"); n < 13 || n > 18 {
			t.Errorf("%d tries in ten minutes", n)
		}
		s.mu.Lock()
		delete(s.fail, "boot")
		s.mu.Unlock()
		time.Sleep(keeperMost)
		synctest.Wait()
		if err := k.Ready(); err != nil || k.made() != 1 {
			t.Errorf("ready: %v, %d templates", err, k.made())
		}
		m, err := k.Create(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	})
}

// Another image gives another template; the old one serves until it is made, also when that fails.
func TestKeeperFollowsTheImage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStage()
		k := keep(t, s)
		synctest.Wait()
		k.set(func() { k.err = images.ErrNotBuilt })
		time.Sleep(time.Minute)
		if _, err := k.Create(t.Context()); err != nil {
			t.Errorf("the template is of no use without its image's directory: %v", err)
		}
		k.set(func() { k.err, k.image.Digest = nil, "sha256:5678" })
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		if k.made() != 2 {
			t.Fatalf("%d templates", k.made())
		}
		m, err := k.Create(t.Context())
		if err != nil || m.Image() != "sha256:5678" {
			t.Fatalf("%v, %v", m, err)
		}
		time.Sleep(time.Hour)
		if n := s.count("boot"); n != 2 {
			t.Errorf("booted %d times for two images", n)
		}
		if err := k.p.Close(); err != nil {
			t.Error(err)
		}
	})
}

// A template that the driver refuses is made anew at once.
func TestKeeperReplacesARefusedTemplate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStage()
		k := keep(t, s)
		synctest.Wait()
		s.mu.Lock()
		s.fail["restore"] = vmm.ErrTemplate
		s.mu.Unlock()
		if _, err := k.Create(t.Context()); !errors.Is(err, vmm.ErrTemplate) {
			t.Fatalf("got %v", err)
		}
		s.mu.Lock()
		delete(s.fail, "restore")
		s.mu.Unlock()
		synctest.Wait()
		if k.made() != 2 || k.Ready() != nil {
			t.Errorf("%d templates, ready: %v", k.made(), k.Ready())
		}
	})
}
