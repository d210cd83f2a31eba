package gateway

import (
	"context"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/gofiber/fiber/v2"

	"github.com/ephemeral-run/ephemeral/run"
)

// servedFor is how long the gateway goes by what the nodes said before about the images that they serve.
const servedFor = time.Second

// maxImages bounds how many images an organisation can be limited to.
const maxImages = 64

// imageStore is what images ask of the run store; *run.Store has it.
type imageStore interface {
	ServedImages(ctx context.Context) (names []string, known bool, err error)
	AllowImages(ctx context.Context, org string, names []string) (run.Org, error)
}

// servedImages remembers which images the cell serves. One request at a time looks again; the others go by what is known.
type servedImages struct {
	looking sync.Mutex

	mu    sync.Mutex
	names []string
	known bool
	at    time.Time
}

// in returns the images that a run can use; known is false while no node has said any.
func (s *servedImages) in(ctx context.Context, store imageStore) (names []string, known bool, err error) {
	names, known, fresh := s.last()
	switch {
	case fresh:
		return names, known, nil
	case known && !s.looking.TryLock():
		return names, known, nil
	case !known:
		s.looking.Lock()
	}
	defer s.looking.Unlock()
	if names, known, fresh = s.last(); fresh {
		return names, known, nil
	}
	if names, known, err = store.ServedImages(ctx); err != nil {
		return nil, false, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.names, s.known, s.at = names, known, time.Now()
	return names, known, nil
}

func (s *servedImages) last() (names []string, known, fresh bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.names, s.known, !s.at.IsZero() && time.Since(s.at) < servedFor
}

// image checks that the cell serves the image, and leaves it out where it is the default: written out or not, it is the same
// request.
func (v *violations) image(q *request, r rules) {
	s := &q.spec
	if q.given.has("image") && s.Image == "" {
		v.invalid("image", "is empty")
		return
	}
	if s.Image == run.DefaultImage {
		s.Image = ""
	}
	if !r.imagesKnown && s.Image == "" || slices.Contains(r.images, s.ImageName()) {
		return
	}
	detail := "is not an image of this server: " + shorten(s.ImageName())
	if !q.given.has("image") {
		detail = "is required, since this server does not serve " + run.DefaultImage
	}
	if len(r.images) > 0 {
		detail += "; it serves " + strings.Join(r.images, ", ")
	}
	v.add(CodeUnknownImage, "image", detail)
}

// putOrgImages answers PUT /v1/orgs/{id}/images.
func (s *Server) putOrgImages(ctx context.Context, c *fiber.Ctx, _ run.Key) error {
	org, err := s.org(ctx, c)
	if err != nil {
		return err
	}
	names, given := []string{}, false
	err = s.readFields(ctx, c, func(d *decoder, name string) error {
		if name != "images" {
			return errUnknownField
		}
		given = true
		return d.array(name, maxImages, func(d *decoder, path string) error {
			var n string
			err := d.text(path, &n)
			names = append(names, n)
			return err
		})
	}, func(v *violations) {
		if !given {
			v.invalid("images", "is required")
		}
	})
	if err != nil {
		return err
	}
	if org, err = s.deps.Store.AllowImages(ctx, org.ID, names); err != nil {
		return err
	}
	return sendJSON(c, http.StatusOK, org)
}
