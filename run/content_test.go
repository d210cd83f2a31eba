package run

import (
	"encoding/json"
	"reflect"
	"runtime"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// TestEncodeWhole: a spec with files is what encoding/json makes of it, and is in memory once.
func TestEncodeWhole(t *testing.T) {
	sp := Spec{Command: "true", Files: []File{{Path: "a", Content: strings.Repeat("QUJD", 1<<20), Encoding: "base64"}, {Path: "b", Content: strings.Repeat("<é>\n", 1000)}}}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	b, err := encodeWhole(&sp)
	if err != nil {
		t.Fatal(err)
	}
	runtime.ReadMemStats(&after)
	if n := after.TotalAlloc - before.TotalAlloc; n > 5<<20 {
		t.Errorf("%d KiB allocated for %d", n>>10, len(b)>>10)
	}
}

func TestEncodeWholeProperty(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		text := rapid.StringN(0, 20, -1)
		want := Spec{Prompt: text.Draw(t, "prompt"), Web: rapid.Bool().Draw(t, "web"), Metadata: rapid.MapOfN(text, text, 1, 3).Draw(t, "metadata")}
		for range rapid.IntRange(1, 3).Draw(t, "files") {
			want.Files = append(want.Files, File{Path: text.Draw(t, "path"), Content: text.Draw(t, "content"), Mode: text.Draw(t, "mode")})
		}
		b, err := encodeWhole(&want)
		if err != nil {
			t.Fatal(err)
		}
		var got, std map[string]any
		plain, err := json.Marshal(want)
		if err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(b, &got); err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(plain, &std); err != nil {
			t.Fatal(err)
		}
		if !reflect.DeepEqual(got, std) {
			t.Fatalf("%s, want %s", b, plain)
		}
	})
}
