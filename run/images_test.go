package run

import (
	"slices"
	"strings"
	"testing"
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
