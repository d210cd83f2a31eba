package connection

import (
	"errors"
	"fmt"
	"net/url"
	"strings"
	"unicode/utf8"
)

// The bounds of a path.
const (
	maxPath     = 4096
	maxSegments = 64
)

// Path is a canonical absolute path: its segments, decoded. Two servers cannot read it differently.
type Path []string

// ParsePath reads a path as it stands in a request, and refuses what is not in canonical form: dot segments, empty
// segments other than the last, and characters that some servers decode twice or take for a separator.
func ParsePath(escaped string) (Path, error) {
	switch {
	case len(escaped) > maxPath:
		return nil, fmt.Errorf("the path has more than %d bytes", maxPath)
	case !strings.HasPrefix(escaped, "/"):
		return nil, errors.New("the path must begin with a slash")
	}
	raw := strings.Split(escaped[1:], "/")
	if len(raw) > maxSegments {
		return nil, fmt.Errorf("the path has more than %d segments", maxSegments)
	}
	p := make(Path, len(raw))
	for i, s := range raw {
		if s == "" && i < len(raw)-1 {
			return nil, errors.New("the path has an empty segment")
		}
		d, err := url.PathUnescape(s)
		if err != nil {
			return nil, errors.New("the path has a broken escape")
		}
		if err := checkSegment(d); err != nil {
			return nil, err
		}
		p[i] = d
	}
	return p, nil
}

// checkSegment refuses what servers do not agree on.
func checkSegment(s string) error {
	name, _, _ := strings.Cut(s, ";") // some servers drop what follows
	switch {
	case name == "." || name == "..":
		return errors.New("the path has a dot segment")
	case strings.ContainsAny(s, `/\`):
		return errors.New("the path has an encoded separator")
	case !utf8.ValidString(s) || strings.ContainsFunc(s, control):
		return errors.New("the path has control characters or is no UTF-8")
	case strings.Contains(s, "%"):
		if once, err := url.PathUnescape(s); err == nil && once != s {
			return errors.New("the path is encoded twice")
		}
	}
	return nil
}

// String is the path as it is sent: every segment escaped in the same way.
func (p Path) String() string {
	var b strings.Builder
	for _, s := range p {
		b.WriteByte('/')
		b.WriteString(url.PathEscape(s))
	}
	if len(p) == 0 {
		return "/"
	}
	return b.String()
}

// decoded is the path unescaped, as url.URL.Path wants it.
func (p Path) decoded() string { return "/" + strings.Join(p, "/") }

// Below is the URL of the path below a base URL.
func (p Path) Below(base *url.URL) *url.URL {
	u := *base
	u.RawPath = strings.TrimSuffix(base.EscapedPath(), "/") + p.String()
	u.Path = strings.TrimSuffix(base.Path, "/") + p.decoded()
	return &u
}

// Pattern is a rule for paths: literal segments, * for any one segment, ** at the end for any rest, the empty one included.
type Pattern []string

// ParsePattern reads a pattern such as /v1/invoices/*/lines or /v1/**.
func ParsePattern(s string) (Pattern, error) {
	p, err := ParsePath(s)
	if err != nil {
		return nil, err
	}
	for i, seg := range p {
		switch {
		case seg == "**" && i < len(p)-1:
			return nil, errors.New("** stands at the end only")
		case seg != "*" && seg != "**" && strings.Contains(seg, "*"):
			return nil, errors.New("* stands for a whole segment")
		}
	}
	return Pattern(p), nil
}

// Match tells whether the pattern covers the path.
func (p Pattern) Match(path Path) bool {
	for i, seg := range p {
		if seg == "**" {
			return true
		}
		if i >= len(path) || seg != path[i] && (seg != "*" || path[i] == "") {
			return false
		}
	}
	return len(p) == len(path)
}

// AllowsPath tells whether a request may have this path.
func (c Connection) AllowsPath(path Path) bool {
	for _, s := range c.Paths {
		if p, err := ParsePattern(s); err == nil && p.Match(path) {
			return true
		}
	}
	return false
}
