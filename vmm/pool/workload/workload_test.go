package workload

import (
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func random() *rand.Rand { return rand.New(rand.NewPCG(1, 2)) }

func durations(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "durations.txt")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestDistributionsHaveTheMomentsTheySay(t *testing.T) {
	file := "file:" + durations(t, "# measured\n1s\n\n2.5 # slow\n2500ms\n")
	for text, want := range map[string]struct{ mean, deviation float64 }{
		"250ms":            {0.25, 0},
		"const:1.5":        {1.5, 0},
		"exp:2s":           {2, 2},
		"uniform:1s,3s":    {2, 1 / math.Sqrt(3)},
		"lognormal:2s,0.5": {2, 1},
		"lognormal:0s,0.5": {0, 0},
		file:               {2, math.Sqrt(0.5)},
	} {
		d, err := ParseDist(text)
		if err != nil {
			t.Errorf("%s: %v", text, err)
			continue
		}
		if got := d.Mean().Seconds(); math.Abs(got-want.mean) > 1e-9 {
			t.Errorf("%s: says its mean is %g, want %g", text, got, want.mean)
		}
		const n = 200_000
		var sum, squares float64
		r := random()
		for range n {
			x := d.Sample(r).Seconds()
			if x < 0 {
				t.Fatalf("%s: drew %g", text, x)
			}
			sum += x
			squares += x * x
		}
		mean := sum / n
		deviation := math.Sqrt(max(0, squares/n-mean*mean))
		if math.Abs(mean-want.mean) > 0.01*want.mean || math.Abs(deviation-want.deviation) > 0.02*want.deviation+1e-6 {
			t.Errorf("%s: mean %g, deviation %g, want %g and %g", text, mean, deviation, want.mean, want.deviation)
		}
		again, err := ParseDist(d.String())
		if err != nil || again.Mean() != d.Mean() {
			t.Errorf("%s: does not read what it writes, %q: %v", text, d.String(), err)
		}
	}
}

func TestDistributionsRefused(t *testing.T) {
	for text, want := range map[string]string{
		"gauss:1s": "want const:", "exp": "duration", "exp:1s,2s": "takes 1 value", "uniform:3s,1s": "is less than",
		"lognormal:1s,-1": "coefficient", "lognormal:1s,NaN": "coefficient", "const:-1s": "from 0", "const:NaN": "duration",
		"const:1e300": "duration", "const:800h": "from 0", "file:/does/not/exist": "no such file",
		"file:" + durations(t, "1s\nsoon\n"): "line 2", "file:" + durations(t, "# none\n"): "no durations",
	} {
		if _, err := ParseDist(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want an error with %q", text, err, want)
		}
	}
}

func parse[P Process](t *testing.T, f func(string) (P, error), text string) Process {
	t.Helper()
	p, err := f(text)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// TestProcessesHaveTheirRate also holds the index of dispersion of counts: 1 for Poisson, far above it for bursts.
func TestProcessesHaveTheirRate(t *testing.T) {
	for _, tt := range []struct {
		p         Process
		rate      float64
		low, high float64 // dispersion of counts per 10 s
	}{
		{parse(t, ParsePoisson, "4"), 4, 0.9, 1.1},
		{parse(t, ParseBursty, "0.5,20,10s,50s"), 3.75, 20, 200},
		{parse(t, ParseBursty, "0,20,10s,50s"), 20.0 / 6, 20, 200},
		{parse(t, ParseDiurnal, "1,5,10m"), 3, 5, 20},
	} {
		next := tt.p.Start(random())
		const n = 300_000
		var last time.Duration
		counts := map[int64]int{}
		for range n {
			at, ok := next()
			if !ok || at < last {
				t.Fatalf("%s: %s after %s, %v", tt.p, at, last, ok)
			}
			last = at
			counts[int64(at/(10*time.Second))]++
		}
		rate := n / last.Seconds()
		var squares float64
		windows := float64(last / (10 * time.Second))
		for _, c := range counts {
			squares += float64(c) * float64(c)
		}
		mean := n / windows
		dispersion := (squares/windows - mean*mean) / mean
		if tt.p.Rate() != tt.rate || math.Abs(rate-tt.rate) > 0.06*tt.rate {
			t.Errorf("%s: %g arrivals a second, says %g, want %g", tt.p, rate, tt.p.Rate(), tt.rate)
		}
		if dispersion < tt.low || dispersion > tt.high {
			t.Errorf("%s: dispersion %g, want %g to %g", tt.p, dispersion, tt.low, tt.high)
		}
	}
}

func TestProcessesRefused(t *testing.T) {
	for text, f := range map[string]func(string) (Process, error){
		"0": process(ParsePoisson), "-1": process(ParsePoisson), "Inf": process(ParsePoisson), "x": process(ParsePoisson),
		"1,2,3s": process(ParseBursty), "1,0,1s,1s": process(ParseBursty), "1,2,0s,1s": process(ParseBursty), "1,2,x,1s": process(ParseBursty),
		"1,2": process(ParseDiurnal), "2,1,1h": process(ParseDiurnal), "1,2,0s": process(ParseDiurnal), "NaN,2,1h": process(ParseDiurnal),
	} {
		if p, err := f(text); err == nil {
			t.Errorf("%q was read as %s", text, p)
		}
	}
}

func process[P Process](f func(string) (P, error)) func(string) (Process, error) {
	return func(s string) (Process, error) {
		p, err := f(s)
		return p, err
	}
}

// TestWorkloadsAreReplayed: two plays are the same, and other service times leave the arrivals alone.
func TestWorkloadsAreReplayed(t *testing.T) {
	w := Workload{Process: Poisson(2), Service: Exp(time.Second), Count: 100, Seed: 7}
	other := w
	other.Service = Const(time.Second)
	a, b, c := w.Start(), w.Start(), other.Start()
	for i := range 101 {
		x, xok := a()
		y, yok := b()
		z, _ := c()
		if x != y || xok != yok || xok != (i < 100) || x.At != z.At {
			t.Fatalf("claim %d: %v and %v, other %v", i, x, y, z)
		}
	}
	given := Workload{Given: []Arrival{{1, 2}, {3, 4}}, ServiceGiven: true, Count: 5}.Start()
	for _, want := range []Arrival{{1, 2}, {3, 4}, {}} {
		if got, ok := given(); got != want || ok != (want != Arrival{}) {
			t.Fatalf("%v, %v, want %v", got, ok, want)
		}
	}
}
