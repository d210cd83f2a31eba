package gateway

import (
	"net/http"
	"strings"

	"github.com/gofiber/fiber/v2"

	"github.com/ephemeral-run/ephemeral/gateway/web"
)

// languageCookie remembers the language that a person chose. It says nothing else.
const languageCookie = "language"

// pagePolicy lets pages load what this server serves and nothing else, run no script that is not one of its files, and
// keeps every sink that would turn text into markup shut.
const pagePolicy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; " +
	"base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"

// siteRoutes are the pages for people. They hold no data: what they show comes from the public API.
func (s *Server) siteRoutes() []route {
	page := func(name string) fiber.Handler {
		return func(c *fiber.Ctx) error { return s.page(c, name) }
	}
	return withHead([]route{
		{http.MethodGet, "/", page("playground")},
		{http.MethodGet, "/runs/:id", page("run")},
		{http.MethodGet, "/shared", page("shared")},
		{http.MethodGet, "/ops", page("ops")},
		{http.MethodGet, web.AssetPrefix + "*", s.asset},
		{http.MethodGet, "/favicon.ico", s.favicon},
	})
}

// page answers with a page in the person's language.
func (s *Server) page(c *fiber.Ctx, name string) error {
	f := s.site.Page(name, web.Choose(c.Cookies(languageCookie), c.Get(fiber.HeaderAcceptLanguage)))
	c.Set(fiber.HeaderContentSecurityPolicy, pagePolicy)
	c.Set("Cross-Origin-Opener-Policy", "same-origin")
	c.Set("Cross-Origin-Resource-Policy", "same-origin")
	c.Set(fiber.HeaderReferrerPolicy, "no-referrer")
	c.Set("Permissions-Policy", "camera=(), geolocation=(), microphone=()")
	c.Vary(fiber.HeaderAcceptLanguage, fiber.HeaderCookie)
	return sendFile(c, f, "private, no-cache")
}

// asset answers with a file whose address changes with its content.
func (s *Server) asset(c *fiber.Ctx) error {
	f, ok := s.site.Asset(c.Params("*"))
	if !ok {
		return problem(CodeNotFound, "")
	}
	c.Set("Cross-Origin-Resource-Policy", "same-origin")
	return sendFile(c, &f, "public, max-age=31536000, immutable")
}

// favicon answers those who ask without having looked at a page.
func (s *Server) favicon(c *fiber.Ctx) error {
	return c.Redirect(s.site.Address("icon.svg"), http.StatusFound)
}

// sendFile answers with f, compressed where the client takes that, or with 304 where it has f.
func sendFile(c *fiber.Ctx, f *web.File, caching string) error {
	c.Set(fiber.HeaderCacheControl, caching)
	c.Set(fiber.HeaderETag, f.ETag)
	c.Vary(fiber.HeaderAcceptEncoding)
	if matches(c.Get(fiber.HeaderIfNoneMatch), f.ETag) {
		return c.SendStatus(http.StatusNotModified)
	}
	c.Set(fiber.HeaderContentType, f.Type)
	if f.Gzip != nil && c.AcceptsEncodings("gzip", "identity") == "gzip" {
		c.Set(fiber.HeaderContentEncoding, "gzip")
		return c.Send(f.Gzip)
	}
	return c.Send(f.Body)
}

// matches tells whether an If-None-Match header (RFC 9110, weak comparison) names the tag.
func matches(header, tag string) bool {
	for candidate := range strings.SplitSeq(header, ",") {
		candidate = strings.TrimPrefix(strings.TrimSpace(candidate), "W/")
		if candidate == tag || candidate == "*" {
			return true
		}
	}
	return false
}
