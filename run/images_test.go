package run

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

func (f *fixture) admitImage(image string) error {
	_, _, err := f.Admit(f.ctx, Admission{Org: "o", Spec: Spec{Command: "true", Image: image, MaxCostMicros: 1}})
	return err
}

// An organisation's runs use only the images that it may, and what is refused holds nothing.
func TestAllowedImages(t *testing.T) {
	f := newFixture(t)
	f.newOrg("o", 10, 1000)
	f.must(f.admitImage("data")) // any, unless told otherwise
	o, err := f.AllowImages(f.ctx, "o", []string{"data", "base", "data"})
	f.must(err)
	f.same(o.Images, []string{"base", "data"})
	f.must(f.admitImage(""))
	f.must(f.admitImage("data"))
	before := f.account("o")
	for _, other := range []string{"dat", "ata", "base-data", "secret"} {
		f.want(f.admitImage(other), ErrImage)
	}
	f.same(f.account("o"), before)
	f.must(second(f.AllowImages(f.ctx, "o", []string{"data"})))
	f.want(f.admitImage(""), ErrImage)
	f.want(f.admitImage("base"), ErrImage)
	o, err = f.AllowImages(f.ctx, "o", nil)
	f.must(err)
	f.same(len(o.Images), 0)
	f.must(f.admitImage("secret"))
	f.balanced()
}

func TestAllowImagesRefuses(t *testing.T) {
	f := newFixture(t)
	f.newOrg("o", 10, 1000)
	for _, names := range [][]string{{"a,b"}, {"Base"}, {""}, {"../x"}, {strings.Repeat("a", 64)}, slices.Collect(func(yield func(string) bool) {
		for i := range maxImages + 1 {
			if !yield("i" + strings.Repeat("x", i%60) + string(rune('a'+i/60))) {
				return
			}
		}
	})} {
		_, err := f.AllowImages(f.ctx, "o", names)
		f.want(err, ErrRange)
	}
	_, err := f.AllowImages(f.ctx, "nobody", nil)
	f.want(err, ErrNotFound)
	f.want(f.admitImage("a,b"), ErrRange)
}

// A run can use the images that every living node serves: any of them may take it.
func TestServedImages(t *testing.T) {
	f := newFixture(t)
	check := func(want []string, wantKnown bool) {
		t.Helper()
		got, known, err := f.ServedImages(f.ctx)
		f.must(err)
		if known != wantKnown || !slices.Equal(got, want) {
			t.Errorf("served %v, known %v; want %v, %v", got, known, want, wantKnown)
		}
	}
	check(nil, false)
	f.must(f.Announce(f.ctx, Node{ID: "old"})) // of a version that does not tell
	check([]string{"base"}, true)
	f.must(f.Announce(f.ctx, Node{ID: "old", Images: []string{"tools", "data", "base"}}))
	check([]string{"base", "data", "tools"}, true)
	f.must(f.Announce(f.ctx, Node{ID: "new", Images: []string{"data", "tools", "gpu"}}))
	check([]string{"data", "tools"}, true)
	f.must(f.Retire(f.ctx, "old"))
	check([]string{"data", "gpu", "tools"}, true)
}

// A node takes only runs of images that it has machines of; the others keep their places and go to a node that has them.
func TestTakeOfImages(t *testing.T) {
	f := newFixture(t)
	for _, org := range []string{"a", "b"} {
		f.newOrg(org, 500, 100_000)
	}
	admit := func(org, image string) ID {
		t.Helper()
		f.clock.advance(time.Millisecond)
		r, _, err := f.Admit(f.ctx, Admission{Org: org, Spec: Spec{Command: "true", Image: image, MaxCostMicros: 1}})
		f.must(err)
		return r.ID
	}
	take := func(want ID, images ...string) {
		t.Helper()
		l, err := f.tryTake(f.ctx, "n1", images...)
		f.must(err)
		switch {
		case l == nil && want != "":
			t.Errorf("nothing for %v, want %s", images, want)
		case l != nil && l.Run != want:
			t.Errorf("%s (%s) for %v, want %q", l.Run, l.Spec.ImageName(), images, want)
		}
	}
	a1, a2, a3 := admit("a", "data"), admit("a", ""), admit("a", "data-2")
	b1 := admit("b", "data")
	take("", "dat", "ata", "data-", "other")
	take(a2, "base") // past an older one of its organisation
	take("", "base")
	take(b1, "data", "base") // b was served longer ago
	take(a1, "data", "base")
	take("", "data", "base")
	take(a3)
	f.balanced()

	// Many that wait for another image hold nobody up.
	var blocked []ID
	for range 99 {
		blocked = append(blocked, admit("a", "data"))
	}
	last := admit("a", "base")
	take(last, "base")
	for i := range 40 {
		org := fmt.Sprintf("blocked%d", i)
		f.newOrg(org, 0, 100)
		blocked = append(blocked, admit(org, "data"))
	}
	free := admit("b", "base")
	take(free, "base")
	take("", "base")
	taken := map[ID]bool{}
	for range blocked {
		l, err := f.tryTake(f.ctx, "n2", "data")
		f.must(err)
		taken[l.Run] = true
	}
	for _, id := range blocked {
		if !taken[id] {
			t.Errorf("%s was not taken", id)
		}
	}
	f.balanced()
}

// A node that waits asks again and again what it has machines of, and takes nothing while it has none.
func TestTakeWaitsForAnImage(t *testing.T) {
	f := newFixture(t)
	f.newOrg("o", 0, 1000)
	f.must(f.admitImage("data"))
	for _, able := range [][]string{nil, {}, {"base"}} {
		ctx, cancel := context.WithTimeout(f.ctx, 200*time.Millisecond)
		if l, err := f.TakeOf(ctx, "n1", func() []string { return able }); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%v: %v, %v", able, l, err)
		}
		cancel()
	}
	var looks atomic.Int32
	ctx, cancel := context.WithTimeout(f.ctx, time.Minute)
	defer cancel()
	l, err := f.TakeOf(ctx, "n1", func() []string {
		if looks.Add(1) == 1 {
			return []string{"base"}
		}
		return []string{"base", "data"}
	})
	f.must(err)
	// What is given back keeps its image.
	f.must(f.Requeue(f.ctx, l))
	if l, err := f.tryTake(f.ctx, "n1", "base"); l != nil || err != nil {
		t.Errorf("%v, %v", l, err)
	}
	if l, err := f.tryTake(f.ctx, "n1", "data"); l == nil || err != nil {
		t.Errorf("%v, %v", l, err)
	}
}
