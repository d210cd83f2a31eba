package main

import (
	"slices"
	"strings"
	"testing"
)

// Two calls of redis-benchmark that draw the same numbers make different runs with different idempotency keys.
func TestRoundsOfRedisBenchmarkDiffer(t *testing.T) {
	const id = "run_0195f0c0a1b27c3d8e4f001122334455"
	words := []string{"evalsha", "{c0}:idem:bench:" + "job-0000000000000000000042", "{c0}:run:" + id, id, "{c0}:bench:queue"}
	words, err := anyNumber(words, id)
	if err != nil {
		t.Fatal(err)
	}
	drawn := func(round int) []string {
		w := ofRound(words, round)
		for i := range w {
			w[i] = strings.ReplaceAll(w[i], random, "000000000007")
		}
		return w
	}
	first, second := drawn(1), drawn(2)
	for i := range words {
		if made := strings.Contains(words[i], random); made == (first[i] == second[i]) {
			t.Errorf("%q and %q", first[i], second[i])
		}
	}
	if !slices.Equal(first, drawn(1)) || len(first[3]) != len(id) || first[3][:17+len("run_")] != id[:17+len("run_")] {
		t.Errorf("%q", first)
	}
}
