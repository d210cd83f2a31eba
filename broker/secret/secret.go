// Package secret keeps credentials out of what is printed, and takes them out of what others send back.
package secret

import (
	"bytes"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"html"
	"io"
	"log/slog"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Mask stands where a secret was.
const Mask = "[redacted]"

// MinLength is how many bytes a secret must have for it to be looked for: shorter ones occur by chance.
const MinLength = 8

// Value is a secret. Printing, logging or encoding it gives the mask; string(v) is the secret itself.
type Value string

// String returns the mask.
func (v Value) String() string { return v.shown() }

// Format prints the mask whatever the verb.
func (v Value) Format(f fmt.State, _ rune) { _, _ = io.WriteString(f, v.shown()) }

// LogValue returns the mask.
func (v Value) LogValue() slog.Value { return slog.StringValue(v.shown()) }

// MarshalText returns the mask.
func (v Value) MarshalText() ([]byte, error) { return []byte(v.shown()), nil }

func (v Value) shown() string {
	if v == "" {
		return ""
	}
	return Mask
}

// Scrubber finds secrets in text: as they are, and base64, hexadecimal or URL encoded, also inside something longer that
// was encoded as a whole. A nil scrubber finds nothing. It is safe for concurrent use.
type Scrubber struct {
	plain []string
	forms [][]byte
}

// NewScrubber looks for the given secrets; those shorter than MinLength are left out.
func NewScrubber(secrets ...Value) *Scrubber {
	s := &Scrubber{}
	for _, v := range secrets {
		if len(v) < MinLength || slices.Contains(s.plain, string(v)) {
			continue
		}
		s.plain = append(s.plain, string(v))
		for _, f := range forms(string(v)) {
			if !slices.ContainsFunc(s.forms, func(o []byte) bool { return string(o) == f }) {
				s.forms = append(s.forms, []byte(f))
			}
		}
	}
	// Longest first, so that masking one form cannot break a longer one apart.
	slices.SortStableFunc(s.forms, func(a, b []byte) int { return len(b) - len(a) })
	return s
}

// forms returns the ways in which v may be written.
func forms(v string) []string {
	all := []string{v, url.QueryEscape(v), url.PathEscape(v), hex.EncodeToString([]byte(v)), strings.ToUpper(hex.EncodeToString([]byte(v)))}
	for shift := range 3 {
		// base64 of v behind shift unknown bytes: the characters that depend on v alone.
		std := base64.RawStdEncoding.EncodeToString([]byte(strings.Repeat("\x00", shift) + v))
		first, last := (shift*8+5)/6, (shift+len(v))*8/6
		std = std[first:last]
		all = append(all, std, strings.NewReplacer("+", "-", "/", "_").Replace(std), url.QueryEscape(std))
	}
	return all
}

// Found tells whether b holds a secret in any form.
func (s *Scrubber) Found(b []byte) bool {
	if s == nil {
		return false
	}
	return slices.ContainsFunc(s.forms, func(f []byte) bool { return bytes.Contains(b, f) })
}

// Scrub returns b with every form of every secret masked; b itself when there is none.
func (s *Scrubber) Scrub(b []byte) []byte {
	if s == nil {
		return b
	}
	for _, f := range s.forms {
		if bytes.Contains(b, f) {
			b = bytes.ReplaceAll(b, f, []byte(Mask))
		}
	}
	return b
}

// Hidden tells whether b shows a secret only to those who take it out of some wrapping, where Scrub does not find it:
// escapes of JSON, of programs, of URLs or of HTML, up to two around each other, or spaces, line breaks and invisible characters within.
func (s *Scrubber) Hidden(b []byte) bool {
	if s == nil || len(s.forms) == 0 {
		return false
	}
	b = s.Scrub(b)
	return s.hidden(b, 2)
}

func (s *Scrubber) hidden(b []byte, depth int) bool {
	for _, unwrap := range []func([]byte) []byte{squeeze, unescapeURL, unescapeHTML, unescapeBackslash} {
		inner := unwrap(b)
		if inner == nil {
			continue
		}
		if s.Found(inner) || depth > 1 && s.hidden(inner, depth-1) {
			return true
		}
	}
	return false
}

// squeeze drops white space, control and invisible characters; nil when there are none.
func squeeze(b []byte) []byte {
	dropped := func(r rune) bool { return unicode.IsSpace(r) || unicode.IsControl(r) || unicode.Is(unicode.Cf, r) }
	if !bytes.ContainsFunc(b, dropped) {
		return nil
	}
	return bytes.Map(func(r rune) rune {
		if dropped(r) {
			return -1
		}
		return r
	}, b)
}

// unescapeURL undoes percent encoding and leaves what is none; nil when there is none.
func unescapeURL(b []byte) []byte {
	if bytes.IndexByte(b, '%') < 0 {
		return nil
	}
	out := make([]byte, 0, len(b))
	for i := 0; i < len(b); i++ {
		if b[i] == '%' && i+2 < len(b) {
			if n, err := hex.DecodeString(string(b[i+1 : i+3])); err == nil {
				out = append(out, n[0])
				i += 2
				continue
			}
		}
		out = append(out, b[i])
	}
	return out
}

func unescapeHTML(b []byte) []byte {
	if bytes.IndexByte(b, '&') < 0 {
		return nil
	}
	return []byte(html.UnescapeString(string(b)))
}

// unescapeBackslash undoes \uXXXX, \xXX and a backslash before any other character; nil when there is none.
func unescapeBackslash(b []byte) []byte {
	if bytes.IndexByte(b, '\\') < 0 {
		return nil
	}
	out := make([]byte, 0, len(b))
	for i := 0; i < len(b); i++ {
		if b[i] != '\\' || i+1 == len(b) {
			out = append(out, b[i])
			continue
		}
		i++
		digits := map[byte]int{'u': 4, 'x': 2}[b[i]]
		if digits > 0 && i+digits < len(b) {
			if n, err := strconv.ParseUint(string(b[i+1:i+1+digits]), 16, 32); err == nil {
				out = utf8.AppendRune(out, rune(n))
				i += digits
				continue
			}
		}
		out = append(out, b[i])
	}
	return out
}

// Tail is the length of the longest suffix of text that a secret begins with, the whole secret left out: so many bytes
// may turn out to be the start of a secret when more text comes.
func (s *Scrubber) Tail(text []byte) int {
	if s == nil {
		return 0
	}
	longest := 0
	for _, f := range s.forms {
		for n := min(len(f)-1, len(text)); n > longest; n-- {
			if bytes.HasSuffix(text, f[:n]) {
				longest = n
				break
			}
		}
	}
	return longest
}

// Longest is the length of the longest form of any secret.
func (s *Scrubber) Longest() int {
	if s == nil || len(s.forms) == 0 {
		return 0
	}
	return len(s.forms[0])
}
