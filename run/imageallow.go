package run

import (
	"context"
	"fmt"
	"regexp"
	"slices"
	"strings"
)

// maxImages bounds how many images an organisation's runs can be limited to.
const maxImages = 64

// imageName is what images are called: no comma, since names are stored with commas between them.
var imageName = regexp.MustCompile(`^[a-z0-9][a-z0-9-]{0,62}$`)

var imagesOrgScript = loadScript("imagesorg")

// AllowImages sets which images the runs of an organisation may use, from the next admission on, and returns it. No names: any.
// The order and repeated names make no difference. ErrNotFound, ErrRange.
//
// Script imagesorg.lua.
func (s *Store) AllowImages(ctx context.Context, org string, names []string) (Org, error) {
	if !validOrg(org) {
		return Org{}, fmt.Errorf("images of organisation %.64q: %w", org, ErrNotFound)
	}
	names = slices.Compact(slices.Sorted(slices.Values(names)))
	if len(names) > maxImages {
		return Org{}, fmt.Errorf("%d images for organisation %s, want at most %d: %w", len(names), org, maxImages, ErrRange)
	}
	for _, n := range names {
		if !imageName.MatchString(n) {
			return Org{}, fmt.Errorf("image name %.80q: want 1 to 63 of a-z, 0-9 and -: %w", n, ErrRange)
		}
	}
	r, err := s.eval(ctx, imagesOrgScript, []string{s.keys.org(org)}, strings.Join(names, ","))
	if err == nil {
		err = refused(r)
	}
	if err != nil {
		return Org{}, fmt.Errorf("images of organisation %s: %w", org, err)
	}
	return s.Org(ctx, org)
}
