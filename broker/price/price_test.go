package price

import (
	"math"
	"math/big"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/ephemeral-run/ephemeral/run"
)

func TestCost(t *testing.T) {
	luna := Model{Input: 50_000, CachedInput: 5_000, Output: 400_000}
	for _, c := range []struct {
		m                     Model
		input, cached, output int64
		want                  run.Micros
	}{
		{luna, 1412, 0, 61, 95}, {luna, 1604, 0, 167, 147}, {luna, 1854, 1152, 116, 88}, // the recorded run: 330 in all
		{luna, 0, 0, 0, 0}, {luna, 1, 0, 0, 1}, {luna, 20, 0, 0, 1}, {luna, 21, 0, 0, 2},
		{luna, -5, -5, -5, 0}, {luna, 100, 1000, 0, 1},
		{Model{}, math.MaxInt64, 0, math.MaxInt64, 0},
		{Model{Input: maxPrice, Output: maxPrice}, math.MaxInt64, 0, math.MaxInt64, math.MaxInt64},
		{Model{Input: math.MaxInt64, CachedInput: math.MaxInt64, Output: math.MaxInt64}, math.MaxInt64, 5, math.MaxInt64, math.MaxInt64},
	} {
		if got := c.m.Cost(c.input, c.cached, c.output); got != c.want {
			t.Errorf("%+v.Cost(%d, %d, %d) = %d, want %d", c.m, c.input, c.cached, c.output, got, c.want)
		}
	}
}

// exact is Cost with numbers of any size.
func exact(m Model, input, cached, output int64) *big.Int {
	mul := func(a int64, b run.Micros) *big.Int {
		return new(big.Int).Mul(big.NewInt(a), big.NewInt(int64(b)))
	}
	s := mul(input-cached, m.Input)
	s.Add(s, mul(cached, m.CachedInput)).Add(s, mul(output, m.Output)).Add(s, big.NewInt(million-1))
	return s.Div(s, big.NewInt(million))
}

func models(t *rapid.T) Model {
	p := rapid.OneOf(rapid.Int64Range(0, 20_000_000), rapid.Int64Range(0, int64(maxPrice)))
	return Model{Input: run.Micros(p.Draw(t, "in")), CachedInput: run.Micros(p.Draw(t, "cached")), Output: run.Micros(p.Draw(t, "out"))}
}

func TestCostIsExact(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := models(t)
		n := rapid.OneOf(rapid.Int64Range(0, 1<<22), rapid.Int64Range(0, math.MaxInt64))
		input, output := n.Draw(t, "input"), n.Draw(t, "output")
		cached := rapid.Int64Range(0, input).Draw(t, "cached of it")
		got, want := m.Cost(input, cached, output), exact(m, input, cached, output)
		if !want.IsInt64() {
			want = big.NewInt(math.MaxInt64)
		}
		if int64(got) != want.Int64() {
			t.Fatalf("%d, want %v", got, want)
		}
		if m.Worst(input, output) < got {
			t.Fatalf("worst case %d below %d", m.Worst(input, output), got)
		}
	})
}

func TestAffordableIsTheMost(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := models(t)
		input, limit := rapid.Int64Range(0, 1<<23).Draw(t, "input"), rapid.Int64Range(1, 1<<24).Draw(t, "limit")
		granted := run.Micros(rapid.OneOf(rapid.Int64Range(0, 1<<20), rapid.Int64Range(0, math.MaxInt64)).Draw(t, "granted"))
		n := m.Affordable(granted, input, limit)
		switch {
		case n < -1 || n > limit:
			t.Fatalf("%d is out of range", n)
		case n == -1 && m.Worst(input, 0) <= granted:
			t.Fatal("the input could be paid")
		case n >= 0 && m.Worst(input, n) > granted:
			t.Fatalf("%d tokens cost %d of %d", n, m.Worst(input, n), granted)
		case n >= 0 && n < limit && m.Worst(input, n+1) <= granted:
			t.Fatalf("%d tokens more than %d would be paid", n+1, n)
		}
	})
}

func TestLoad(t *testing.T) {
	write := func(text string) string {
		path := filepath.Join(t.TempDir(), "prices.yaml")
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	built, err := Load("")
	if err != nil {
		t.Fatal(err)
	}
	if m, ok := built.Model("replay/whatever"); !ok || m != (Model{50_000, 5_000, 400_000, 4096}) {
		t.Errorf("replay: %+v %v", m, ok)
	}
	if _, ok := built.Model("openai/unlisted"); ok {
		t.Error("an unlisted model has a price")
	}
	own, err := Load(write("compute_per_second: 300\ndefault: {input: 7, output: 8}\nmodels:\n  openai/gpt-5: {input: 1, output: 2, max_output_tokens: 9}\n"))
	if err != nil {
		t.Fatal(err)
	}
	for id, want := range map[string]Model{
		"openai/gpt-5": {1, 1, 2, 9}, "openai/gpt-5-mini": {250_000, 25_000, 2_000_000, 4096}, "openai/unlisted": {7, 7, 8, 4096}, "replay/x": {50_000, 5_000, 400_000, 4096},
	} {
		if m, ok := own.Model(id); !ok || m != want {
			t.Errorf("%s: %+v, want %+v", id, m, want)
		}
	}
	if own.ComputePerSecond != 300 || built.ComputePerSecond != 200 {
		t.Errorf("compute %d, built in %d", own.ComputePerSecond, built.ComputePerSecond)
	}
	for text, want := range map[string]string{
		"models: {openai/x: {input: 1}}":                                  "input and output",
		"models: {openai/x: {input: -1, output: 1}}":                      "input",
		"models: {openai/x: {input: 1.5, output: 1}}":                     "whole number",
		"models: {openai/x: {input: 1, output: 2000000000000}}":           "output",
		"models: {openai/x: {input: 1, output: 1, cached_input: -1}}":     "cached_input",
		"models: {openai/x: {input: 1, output: 1, max_output_tokens: 0}}": "max_output_tokens",
		"models: {x: {input: 1, output: 1}}":                              "provider/model",
		"models: {openai/x: {input: 1, output: 1, inptu: 1}}":             "inptu",
		"modles: {}":                       "modles",
		"compute_per_second: -1":           "compute_per_second",
		"default: {output: 1}":             "default",
		"models: [":                        "",
		"#" + strings.Repeat("x", maxFile): "at most",
	} {
		if _, err := Load(write(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%.60s: error %v, want %q in it", text, err, want)
		}
	}
	if _, err := Load("/does/not/exist"); err == nil {
		t.Error("a missing file is accepted")
	}
}
