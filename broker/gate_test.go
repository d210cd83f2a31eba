package broker

import (
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/ephemeral-run/ephemeral/broker/secret"
)

// TestGate lets two texts that hold pieces of a key, or all of it, come in chunks of any size, interleaved: what passes
// never spells the key nor most of it, and texts without it pass whole.
func TestGate(t *testing.T) {
	const key = "abcabcab-abcabcab-xyz"
	s := secret.NewScrubber(key)
	rapid.Check(t, func(t *rapid.T) {
		words := rapid.SliceOfN(rapid.SampledFrom([]string{"abc", "ab", "-", key[:9], key[9:], key[:15], key, "x", "é"}), 0, 8)
		texts := []string{strings.Join(words.Draw(t, "content"), ""), strings.Join(words.Draw(t, "refusal"), "")}
		var passed [2]strings.Builder
		var pending []int // of which text the event was, and how long, in order
		g := &gate{scrubber: s}
		g.write = func(raw []byte) {
			passed[pending[0]].Write(raw)
			pending = pending[1:]
		}
		ok := true
		rest := texts
		for ok && rest[0]+rest[1] != "" {
			i := rapid.IntRange(0, 1).Draw(t, "which")
			n := min(rapid.IntRange(0, 6).Draw(t, "size"), len(rest[i]))
			piece := rest[i][:n]
			rest = []string{rest[0], rest[1]}
			rest[i] = rest[i][n:]
			var c completion
			c.Choices = append(c.Choices, struct {
				Index        int     `json:"index"`
				Delta        message `json:"delta"`
				Message      message `json:"message"`
				FinishReason *string `json:"finish_reason"`
			}{})
			if i == 0 {
				c.Choices[0].Delta.Content = &piece
			} else {
				c.Choices[0].Delta.Refusal = &piece
			}
			pending = append(pending, i)
			ok = g.push([]byte(piece), &c)
		}
		ok = ok && g.finish()
		spelled := strings.Contains(texts[0], key) || strings.Contains(texts[1], key)
		for i := range passed {
			if p := passed[i].String(); strings.Contains(p, key) || s.Tail([]byte(p)) >= secret.MinLength {
				t.Fatalf("passed %q of %q", p, texts[i])
			} else if ok && p != texts[i] {
				t.Fatalf("passed %q of %q without a word", p, texts[i])
			}
		}
		if ok && spelled {
			t.Fatalf("%q passed", texts)
		}
	})
}
