// Package price says what models and compute cost, in whole micro-dollars. All arithmetic is on integers, rounds in
// favour of whoever pays for the upstream, and saturates instead of overflowing.
package price

import (
	_ "embed"
	"fmt"
	"math"
	"math/bits"
	"os"
	"strconv"
	"strings"

	"github.com/goccy/go-yaml"

	"github.com/ephemeral-run/ephemeral/run"
)

// The bounds of a price file: what lies outside is a mistake.
const (
	maxFile     = 1 << 20
	maxPrice    = run.Micros(1_000_000_000_000) // a million dollars per million tokens, or per second
	maxTokens   = 1 << 30
	million     = 1_000_000
	defaultMax  = 4096
	wildcardEnd = "/*"
)

//go:embed prices.yaml
var embedded []byte

// Model is what one model costs, in micro-dollars per million tokens.
type Model struct {
	Input       run.Micros
	CachedInput run.Micros // input tokens that the provider read from its cache
	Output      run.Micros // output tokens, hidden reasoning included
	// MaxOutputTokens bounds the output of a call that names no limit of its own.
	MaxOutputTokens int64
}

// Table is every price of a node. It does not change once it is loaded.
type Table struct {
	// ComputePerSecond is the price of one second of a machine.
	ComputePerSecond run.Micros
	// Calls are the prices of one call that is not to a model.
	Calls Calls
	// Default prices models that are not listed; nil: they are refused.
	Default *Model
	// Models are keyed by "provider/model"; "provider/*" stands for every other model of the provider.
	Models map[string]Model
}

// Calls is what one call of each kind costs.
type Calls struct {
	WebFetch, WebSearch, Connection, SQL run.Micros
}

// calls is the form of Calls in a price file.
type calls struct {
	WebFetch   *whole `yaml:"web_fetch"`
	WebSearch  *whole `yaml:"web_search"`
	Connection *whole `yaml:"connection"`
	SQL        *whole `yaml:"sql"`
}

// file is the form of a price file.
type file struct {
	Calls            calls            `yaml:"calls"`
	ComputePerSecond *whole           `yaml:"compute_per_second"`
	Default          *entry           `yaml:"default"`
	Models           map[string]entry `yaml:"models"`
}

type entry struct {
	Input           *whole `yaml:"input"`
	CachedInput     *whole `yaml:"cached_input"`
	Output          *whole `yaml:"output"`
	MaxOutputTokens *whole `yaml:"max_output_tokens"`
}

// whole is a whole number. The YAML library would cut 1.5 to 1 without a word.
type whole int64

// UnmarshalYAML reads a decimal number without a fraction.
func (w *whole) UnmarshalYAML(text []byte) error {
	n, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64)
	if err != nil {
		return fmt.Errorf("%.40q is not a whole number", strings.TrimSpace(string(text)))
	}
	*w = whole(n)
	return nil
}

// Load returns the built-in prices, with those of the file at path on top when path is not empty.
func Load(path string) (*Table, error) {
	t := &Table{Models: map[string]Model{}}
	if err := t.merge(embedded); err != nil {
		return nil, fmt.Errorf("built-in prices: %w", err)
	}
	if path == "" {
		return t, nil
	}
	info, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("price file: %w", err)
	}
	if info.Size() > maxFile {
		return nil, fmt.Errorf("price file %s: %d bytes, at most %d are read", path, info.Size(), maxFile)
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("price file: %w", err)
	}
	if err := t.merge(data); err != nil {
		return nil, fmt.Errorf("price file %s: %w", path, err)
	}
	return t, nil
}

func (t *Table) merge(data []byte) error {
	var f file
	if err := yaml.UnmarshalWithOptions(data, &f, yaml.Strict()); err != nil {
		return err
	}
	if f.ComputePerSecond != nil {
		v, err := amount("compute_per_second", *f.ComputePerSecond)
		if err != nil {
			return err
		}
		t.ComputePerSecond = v
	}
	for _, c := range []struct {
		name string
		from *whole
		to   *run.Micros
	}{
		{"web_fetch", f.Calls.WebFetch, &t.Calls.WebFetch}, {"web_search", f.Calls.WebSearch, &t.Calls.WebSearch},
		{"connection", f.Calls.Connection, &t.Calls.Connection}, {"sql", f.Calls.SQL, &t.Calls.SQL},
	} {
		if c.from == nil {
			continue
		}
		v, err := amount("calls."+c.name, *c.from)
		if err != nil {
			return err
		}
		*c.to = v
	}
	if f.Default != nil {
		m, err := f.Default.model("default")
		if err != nil {
			return err
		}
		t.Default = &m
	}
	for id, e := range f.Models {
		if provider, name, ok := strings.Cut(id, "/"); !ok || provider == "" || name == "" {
			return fmt.Errorf("model %q: want provider/model", id)
		}
		m, err := e.model(id)
		if err != nil {
			return err
		}
		t.Models[id] = m
	}
	return nil
}

func (e entry) model(id string) (Model, error) {
	if e.Input == nil || e.Output == nil {
		return Model{}, fmt.Errorf("%s: input and output must be given", id)
	}
	m := Model{MaxOutputTokens: defaultMax}
	var err error
	if m.Input, err = amount(id+": input", *e.Input); err != nil {
		return Model{}, err
	}
	if m.Output, err = amount(id+": output", *e.Output); err != nil {
		return Model{}, err
	}
	m.CachedInput = m.Input
	if e.CachedInput != nil {
		if m.CachedInput, err = amount(id+": cached_input", *e.CachedInput); err != nil {
			return Model{}, err
		}
	}
	if e.MaxOutputTokens != nil {
		if m.MaxOutputTokens = int64(*e.MaxOutputTokens); m.MaxOutputTokens < 1 || m.MaxOutputTokens > maxTokens {
			return Model{}, fmt.Errorf("%s: max_output_tokens %d is not between 1 and %d", id, m.MaxOutputTokens, maxTokens)
		}
	}
	return m, nil
}

func amount(what string, v whole) (run.Micros, error) {
	if v < 0 || run.Micros(v) > maxPrice {
		return 0, fmt.Errorf("%s: %d is not between 0 and %d", what, v, maxPrice)
	}
	return run.Micros(v), nil
}

// Model returns the price of the model with this id, by its name, its provider's wildcard or the default, in this order.
func (t *Table) Model(id string) (Model, bool) {
	if m, ok := t.Models[id]; ok && !strings.HasSuffix(id, wildcardEnd) {
		return m, true
	}
	if provider, _, ok := strings.Cut(id, "/"); ok {
		if m, ok := t.Models[provider+wildcardEnd]; ok {
			return m, true
		}
	}
	if t.Default != nil {
		return *t.Default, true
	}
	return Model{}, false
}

// Cost is what a call costs that read input tokens, cached of them from the cache, and wrote output tokens, rounded up
// to a whole micro-dollar. Negative counts are taken as zero, more cached than read as all cached.
func (m Model) Cost(input, cached, output int64) run.Micros {
	input, output = max(input, 0), max(output, 0)
	cached = min(max(cached, 0), input)
	var s sum
	s.add(input-cached, m.Input)
	s.add(cached, m.CachedInput)
	s.add(output, m.Output)
	return s.perMillion()
}

// Worst is the most that a call can cost that reads at most input tokens and writes at most output tokens.
func (m Model) Worst(input, output int64) run.Micros {
	return max(m.Cost(input, 0, output), m.Cost(input, input, output))
}

// Affordable is the greatest number of output tokens, at most limit, with Worst(input, n) <= granted; -1 when granted
// does not even pay for the input.
func (m Model) Affordable(granted run.Micros, input, limit int64) int64 {
	if m.Worst(input, 0) > granted {
		return -1
	}
	if m.Worst(input, limit) <= granted {
		return limit
	}
	// The output's price is above zero here, or the limit would have been affordable.
	inHi, inLo := bits.Mul64(uint64(max(input, 0)), uint64(max(m.Input, m.CachedInput)))
	allHi, allLo := bits.Mul64(uint64(granted), million)
	lo, borrow := bits.Sub64(allLo, inLo, 0)
	hi, _ := bits.Sub64(allHi, inHi, borrow)
	if hi >= uint64(m.Output) {
		return limit
	}
	n, _ := bits.Div64(hi, lo, uint64(m.Output))
	return int64(min(n, uint64(limit)))
}

// sum is a 128-bit sum of products.
type sum struct {
	hi, lo uint64
}

func (s *sum) add(n int64, each run.Micros) {
	hi, lo := bits.Mul64(uint64(n), uint64(each))
	var carry uint64
	s.lo, carry = bits.Add64(s.lo, lo, 0)
	s.hi, _ = bits.Add64(s.hi, hi, carry)
}

// perMillion divides by a million and rounds up; what does not fit is the greatest amount there is.
func (s sum) perMillion() run.Micros {
	lo, carry := bits.Add64(s.lo, million-1, 0)
	hi := s.hi + carry
	if hi >= million {
		return math.MaxInt64
	}
	q, _ := bits.Div64(hi, lo, million)
	if q > math.MaxInt64 {
		return math.MaxInt64
	}
	return run.Micros(q)
}
