package gateway

import (
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/gofiber/fiber/v2"
)

// cors lets pages of other origins call the API from a browser (WHATWG Fetch, section 3.2). Without origins it does
// nothing. Cookies are never used: what a page needs is the key that its user gave it.
type cors struct {
	origins []string
	any     bool
}

// What a page may send and may read beside the body.
var (
	corsRequest = strings.Join([]string{fiber.HeaderAuthorization, fiber.HeaderContentType, headerIdempotencyKey, headerPrefer,
		headerLastEventID, headerRequestID}, ", ")
	corsResponse = strings.Join([]string{fiber.HeaderLocation, fiber.HeaderLink, fiber.HeaderRetryAfter, fiber.HeaderContentDisposition,
		headerRequestID, headerIdempotencyReplay, headerPreferenceApplied, headerRateLimit, headerRateLimitPolicy}, ", ")
)

// corsMaxAge is for how many seconds a browser may remember a preflight.
const corsMaxAge = "600"

// newCORS checks the origins: "*", or scheme://host[:port] each.
func newCORS(origins []string) (cors, error) {
	c := cors{}
	for _, o := range origins {
		o = strings.TrimSpace(o)
		if o == "*" {
			c.any = true
			continue
		}
		u, err := url.Parse(o)
		if err != nil || u.Host == "" || (u.Scheme != "http" && u.Scheme != "https") || u.Scheme+"://"+u.Host != o {
			return cors{}, fmt.Errorf("EPHEMERAL_CORS_ORIGINS: %.100q: want *, or origins as https://app.example.com", o)
		}
		c.origins = append(c.origins, o)
	}
	return c, nil
}

// serve sets the headers that the request's origin may have. It answers a preflight, and tells so.
func (s *cors) serve(c *fiber.Ctx) (answered bool) {
	if !s.any && len(s.origins) == 0 {
		return false
	}
	c.Append(fiber.HeaderVary, fiber.HeaderOrigin)
	origin := c.Get(fiber.HeaderOrigin)
	switch {
	case origin == "" || !s.any && !slices.Contains(s.origins, origin):
		return false
	case s.any:
		origin = "*"
	}
	c.Set(fiber.HeaderAccessControlAllowOrigin, origin)
	if c.Method() != http.MethodOptions || c.Get(fiber.HeaderAccessControlRequestMethod) == "" {
		c.Set(fiber.HeaderAccessControlExposeHeaders, corsResponse)
		return false
	}
	c.Set(fiber.HeaderAccessControlAllowMethods, "GET, HEAD, POST, PUT, PATCH, DELETE")
	c.Set(fiber.HeaderAccessControlAllowHeaders, corsRequest)
	c.Set(fiber.HeaderAccessControlMaxAge, corsMaxAge)
	c.Status(http.StatusNoContent)
	return true
}
