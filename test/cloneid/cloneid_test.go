package cloneid

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// here runs programs on this host: two "machines" of it share names and addresses, and nothing random.
func here(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) error {
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	cmd.Stdout, cmd.Stderr = stdout, stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	go func() {
		_, _ = io.Copy(in, stdin)
		_ = in.Close()
	}()
	return cmd.Run()
}

func TestObserve(t *testing.T) {
	probe := filepath.Join(t.TempDir(), "probe")
	if out, err := exec.Command("go", "build", "-buildvcs=false", "-o", probe, "./probe").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	var all []Observation
	for range 3 {
		o, err := Observe(t.Context(), here, Options{GoProbe: probe})
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, o)
	}
	for _, name := range append(DefaultLimits.Required, "Go crypto/rand", "Go crypto/ecdh", "Go math/rand/v2", "Go maphash", "Go temporary name", "memory layout") {
		if all[0].Values[name] == "" && !(name == "machine id" && os.Getenv("CI") != "") {
			t.Errorf("no %s", name)
		}
	}
	for _, f := range Compare(all, nil, Limits{ClockError: DefaultLimits.ClockError}) {
		if shared := []string{"boot id", "hostname", "/etc/hostname", "machine id", "working directory", "IP addresses"}; !slices.Contains(shared, f.Name) && !strings.HasPrefix(f.Name, "MAC ") {
			t.Error(f)
		}
	}
	if SharedDraws(all) != 0 {
		t.Error("draws are shared")
	}
	if o, err := Observe(t.Context(), here, Options{DrawsOnly: true}); err != nil || len(o.Draws) != 64 || len(o.Values) != 0 {
		t.Errorf("%+v, %v", o, err)
	}
}

func TestObserveFails(t *testing.T) {
	boom := errors.New("boom")
	for name, run := range map[string]Run{
		"cannot run": func(context.Context, []string, io.Reader, io.Writer, io.Writer) error { return boom },
		"another program": func(_ context.Context, _ []string, _ io.Reader, out, _ io.Writer) error {
			_, _ = io.WriteString(out, "hello\n")
			return nil
		},
		"no clock": func(_ context.Context, _ []string, in io.Reader, out, _ io.Writer) error {
			_, _ = io.WriteString(out, "draw\t00\nvalue\ta\tb\n\n")
			_, _ = in.Read(make([]byte, 1))
			_, _ = io.WriteString(out, "noon\n")
			return nil
		},
		"no end": func(_ context.Context, _ []string, _ io.Reader, out, _ io.Writer) error {
			for {
				if _, err := out.Write([]byte("draw\t00\n")); err != nil {
					return boom
				}
			}
		},
		"endless line": func(_ context.Context, _ []string, _ io.Reader, out, _ io.Writer) error {
			for {
				if _, err := out.Write(make([]byte, 1<<16)); err != nil {
					return boom
				}
			}
		},
	} {
		if _, err := Observe(t.Context(), run, Options{}); err == nil {
			t.Errorf("%s: observed", name)
		}
	}
}

// individuals are n observations that have nothing in common.
func individuals(n int) []Observation {
	all := make([]Observation, n)
	for i := range all {
		all[i] = Observation{Values: map[string]string{}, RoundTrip: time.Millisecond}
		for _, name := range DefaultLimits.Required {
			all[i].Values[name] = fmt.Sprint(name, i)
		}
		for k := range 8 {
			all[i].Draws = append(all[i].Draws, fmt.Sprint("draw", i, k))
		}
	}
	return all
}

// TestCompareFindsEveryFault: whatever two machines are given in common is told of, and which two; without it nothing is.
func TestCompareFindsEveryFault(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(2, 12).Draw(t, "machines")
		all, earlier := individuals(n), []Observation{{Draws: []string{"early"}}}
		if faults := Compare(all, earlier, DefaultLimits); len(faults) != 0 {
			t.Fatalf("individuals: %v", faults)
		}
		a := rapid.IntRange(0, n-1).Draw(t, "a")
		b := (a + rapid.IntRange(1, n-1).Draw(t, "b")) % n
		name := rapid.SampledFrom(DefaultLimits.Required).Draw(t, "name")
		want := "draws"
		switch kind := rapid.SampledFrom([]string{"value", "draw", "earlier", "clock", "missing", "empty"}).Draw(t, "kind"); kind {
		case "value":
			want, all[a].Values[name] = name, all[b].Values[name]
		case "draw":
			all[a].Draws[rapid.IntRange(0, 7).Draw(t, "place")] = all[b].Draws[rapid.IntRange(0, 7).Draw(t, "other place")]
		case "earlier":
			all[a].Draws[3], b = "early", a
		case "clock":
			want, all[a].Ahead, b = "clock", -51*time.Millisecond, a
		case "missing":
			delete(all[a].Values, name)
			want, b = name, a
		case "empty":
			want, all[a].Values[name], b = name, " ", a
		}
		faults := Compare(all, earlier, DefaultLimits)
		if len(faults) == 0 {
			t.Fatal("no fault")
		}
		for _, f := range faults {
			if f.Name != want || !slices.Contains(f.Machines, a) || !slices.Contains(f.Machines, b) || len(f.Machines) > 2 {
				t.Fatalf("%v; want %s of %d and %d", f, want, a, b)
			}
		}
	})
}

func TestClockAllowance(t *testing.T) {
	all := individuals(1)
	all[0].Ahead, all[0].RoundTrip = 60*time.Millisecond, 30*time.Millisecond
	if f := Compare(all, nil, DefaultLimits); len(f) != 0 {
		t.Error(f)
	}
	all[0].RoundTrip = 19 * time.Millisecond
	if f := Compare(all, nil, DefaultLimits); len(f) != 1 {
		t.Error(f)
	}
}
