package secret

import (
	"bytes"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/url"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

func TestValueIsNotShown(t *testing.T) {
	const plain = "hunter2-hunter2"
	v := Value(plain)
	holder := struct {
		Key  Value
		Ptr  *Value
		List []Value
	}{v, &v, []Value{v}}
	var log bytes.Buffer
	l := slog.New(slog.NewJSONHandler(&log, nil))
	l.Info("x", "key", v, "holder", holder)
	l = slog.New(slog.NewTextHandler(&log, nil))
	l.Info("x", "key", v, "holder", holder)
	doc, err := json.Marshal(holder)
	if err != nil {
		t.Fatal(err)
	}
	shown := fmt.Sprintf("%s %v %+v %#v %q %x %d %v %+v %#v", v, v, v, v, v, v, v, holder, holder, holder) + log.String() + string(doc)
	for _, form := range []string{plain, hex.EncodeToString([]byte(plain)), fmt.Sprint([]byte(plain))} {
		if strings.Contains(shown, form) {
			t.Errorf("shown: %s", shown)
		}
	}
	if !strings.Contains(shown, Mask) || Value("").String() != "" || string(v) != plain {
		t.Errorf("mask: %s", shown)
	}
}

var secrets = rapid.Custom(func(t *rapid.T) string {
	return rapid.StringOfN(rapid.RuneFrom([]rune("abcXYZ019-_+/=~ %&?\"\\é")), MinLength, 40, -1).Draw(t, "secret")
})

func TestEveryFormIsFound(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		v := secrets.Draw(t, "v")
		s := NewScrubber(Value(v))
		before, after := rapid.StringN(0, 20, 40).Draw(t, "before"), rapid.StringN(0, 20, 40).Draw(t, "after")
		inside := []byte(before + v + after)
		for name, text := range map[string]string{
			"plain": string(inside), "base64": base64.StdEncoding.EncodeToString(inside), "base64url": base64.RawURLEncoding.EncodeToString(inside),
			"hex": hex.EncodeToString(inside), "HEX": strings.ToUpper(hex.EncodeToString(inside)), "query": url.QueryEscape(string(inside)), "path": url.PathEscape(string(inside)),
		} {
			if !s.Found([]byte(text)) {
				t.Fatalf("%s: %q not found in %q", name, v, text)
			}
			if out := s.Scrub([]byte(text)); s.Found(out) || !bytes.Contains(out, []byte(Mask)) {
				t.Fatalf("%s: scrubbed to %q", name, out)
			}
		}
	})
}

func TestTailSeesASecretComing(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		v := secrets.Draw(t, "v")
		s := NewScrubber(Value(v))
		n := rapid.IntRange(1, len(v)-1).Draw(t, "n")
		if got := s.Tail([]byte("some text " + v[:n])); got < n {
			t.Fatalf("tail %d, want at least %d", got, n)
		}
		if got := s.Tail([]byte(v)); got >= s.Longest() {
			t.Fatalf("tail %d of a whole secret", got)
		}
	})
}

func TestWhatIsNotLookedFor(t *testing.T) {
	s := NewScrubber("short", "", "long enough", "long enough")
	text := []byte("a short text")
	if s.Found(text) || string(s.Scrub(text)) != string(text) || s.Tail([]byte("long eno")) != 8 {
		t.Error("short secrets are looked for, or long ones are not")
	}
	var none *Scrubber
	if none.Found(text) || string(none.Scrub(text)) != string(text) || none.Tail(text) != 0 || none.Longest() != 0 {
		t.Error("a nil scrubber finds something")
	}
	if NewScrubber().Found(text) || NewScrubber().Longest() != 0 {
		t.Error("an empty scrubber finds something")
	}
}
