package main

import (
	"context"
	"fmt"
	"os/exec"
	"regexp"
	"strconv"
)

// queueRows measures what one take costs Redis with few and with many runs waiting, what Redis needs to keep a run, and how long
// an idle node needs to have one: the benchmarks of package run know its keys.
func queueRows(ctx context.Context, _ options, _ string) ([]row, error) {
	say("queue: takes with 100 to 1,000,000 runs waiting")
	out, err := exec.CommandContext(ctx, "go", "test", "-buildvcs=false", "-run", "^$", "-bench", "^Benchmark(Take|Memory|WakeUp)$", "-benchtime", "2000x", "./run").CombinedOutput()
	if err != nil {
		return nil, fmt.Errorf("go test -bench: %w: %s", err, out)
	}
	var rows []row
	for _, waiting := range []int{100, 1000, 10_000, 100_000, 1_000_000} {
		us, err := reported(out, fmt.Sprintf(`BenchmarkTake/waiting=%d(?:-\d+)?`, waiting), "redis-us/op")
		if err != nil {
			return nil, err
		}
		r := row{Name: fmt.Sprintf("queue.take.%d", waiting), Value: us, Unit: "us", Samples: 2000, P95: us}
		if waiting > 100 {
			r.Baseline, r.mostRatio = "queue.take.100", 1.5
		}
		rows = append(rows, r)
	}
	bytes, err := reported(out, `BenchmarkMemory(?:-\d+)?`, "bytes/run")
	if err != nil {
		return nil, err
	}
	rows = append(rows, row{Name: "run.memory", Value: bytes, Unit: "bytes", Samples: 2000, P95: bytes})
	for _, fsync := range []string{"always", "everysec"} {
		r := row{Name: "queue.wake.p99", Unit: "ms", Samples: 2000, most: 5}
		if fsync != "always" {
			r.Name += "." + fsync
		}
		for quantile, into := range map[string]*float64{"p99-ms": &r.Value, "p95-ms": &r.P95} {
			if *into, err = reported(out, "BenchmarkWakeUp/"+fsync+`(?:-\d+)?`, quantile); err != nil {
				return nil, err
			}
		}
		rows = append(rows, r)
	}
	return rows, nil
}

// reported finds a number that a benchmark reported.
func reported(out []byte, name, unit string) (float64, error) {
	line := regexp.MustCompile(`(?m)^` + name + `\s.*?([\d.]+(?:e[+-]?\d+)?) ` + regexp.QuoteMeta(unit) + `\b`)
	m := line.FindSubmatch(out)
	if m == nil {
		return 0, fmt.Errorf("no %s of %s in:\n%s", unit, name, out)
	}
	return strconv.ParseFloat(string(m[1]), 64)
}
