package secret

import (
	"bytes"
	"encoding/base64"
	"encoding/hex"
	"net/url"
	"strings"
	"testing"
)

// FuzzScrub: what was scrubbed shows the secret in none of its forms, and what is not hidden shows it to nobody who undoes
// one wrapping. A text without the secret stays as it is.
func FuzzScrub(f *testing.F) {
	const key = "sk-Fuzz/0123+456?7"
	s := NewScrubber(key)
	for _, text := range []string{"", key, "a" + key + "b", key + key, key[:9] + key, url.QueryEscape(key), hex.EncodeToString([]byte(key)), strings.Join(strings.Split(key, ""), " "),
		base64.StdEncoding.EncodeToString([]byte("xy" + key + "z")), `{"a":"` + strings.ReplaceAll(key, "/", `\/`) + `"}`, "%73%6b-Fuzz", "&#115;k-Fuzz/0123+456?7", "s[redacted]k-Fuzz/0123+456?7"} {
		f.Add([]byte(text), uint8(0))
		f.Add([]byte(text), uint8(3))
	}
	f.Fuzz(func(t *testing.T, text []byte, at uint8) {
		whole := text
		if at > 0 { // the secret somewhere in the text
			i := int(at) % (len(text) + 1)
			whole = append(append(append([]byte(nil), text[:i]...), key...), text[i:]...)
		}
		had := s.Found(whole)
		if at > 0 && !had {
			t.Fatalf("%q: not found", whole)
		}
		clean := s.Scrub(append([]byte(nil), whole...))
		if s.Found(clean) || bytes.Contains(clean, []byte(key)) {
			t.Fatalf("%q becomes %q", whole, clean)
		}
		if !had && !bytes.Equal(clean, whole) {
			t.Fatalf("%q without the secret becomes %q", whole, clean)
		}
		if s.Hidden(whole) {
			return
		}
		if u, err := url.QueryUnescape(string(clean)); err == nil && strings.Contains(u, key) && !strings.Contains(u, " ") {
			t.Fatalf("%q shows the secret when its URL encoding is undone", clean)
		}
		if joined := strings.Join(strings.Fields(string(clean)), ""); strings.Contains(joined, key) {
			t.Fatalf("%q shows the secret without its white space", clean)
		}
	})
}
