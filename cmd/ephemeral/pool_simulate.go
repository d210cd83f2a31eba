package main

import (
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/ephemeral-run/ephemeral/vmm/pool"
	"github.com/ephemeral-run/ephemeral/vmm/pool/chart"
	"github.com/ephemeral-run/ephemeral/vmm/pool/simulate"
	"github.com/ephemeral-run/ephemeral/vmm/pool/trace"
	"github.com/ephemeral-run/ephemeral/vmm/pool/workload"
)

// simulateFlags is what the command line says about a simulation.
type simulateFlags struct {
	trace, poisson, bursty, diurnal   string
	service, restore, settle, destroy string
	maxWait                           time.Duration
	arrivals                          int
	seed                              uint64
	noPool                            bool
	machines, minReady, maxReady      int
	refillConcurrency                 int
	scaleTo, failures                 float64
	memory, readyMemory               int
	wantMisses, wantWait, memoryLimit string
	percentile                        float64
	plots, writeTrace                 string
	output                            outputFormat
}

// simulated is what the command prints as JSON: the result's fields, and what was asked for beside them.
type simulated struct {
	simulate.Result
	Workload       string                   `json:"workload"`
	Recommendation *simulate.Recommendation `json:"recommendation,omitempty"`
	Settings       map[string]string        `json:"recommended_settings,omitempty"`
	Plots          []string                 `json:"plots,omitempty"`
}

func poolSimulateCommand() *cobra.Command {
	var f simulateFlags
	cmd := &cobra.Command{
		Use:   "simulate",
		Short: "Play a workload against the pool's policy in virtual time, and recommend a policy",
		Long: `Plays a workload against the policy and the autoscaler that run on a node, in virtual time: millions of claims in seconds.
The pool is configured as a node's, by EPHEMERAL_POOL_* and EPHEMERAL_MACHINE_MEMORY_MIB; flags go before them.

With a goal (--want-misses, --want-wait) it also searches the policy that reaches it with the least memory.

Distributions: const:250ms, exp:1s (mean), uniform:1s,3s, lognormal:1s,1.5 (mean, coefficient of variation),
file:durations.txt (one a line). The service time is how long a claim keeps its machine.`,
		Example: `  ephemeral pool simulate --poisson 2 --service exp:15s --restore lognormal:200ms,0.3 --machines 64
  ephemeral pool simulate --trace arrivals.csv --want-misses 1% --memory-limit 16GiB --plot plots
  ephemeral pool simulate --bursty 0.5,20,10s,2m --service exp:15s --scale-to 1% --machines 400
  ephemeral pool simulate --poisson 2 --service exp:1s --machines 3 --no-pool    # a queue of three servers`,
		Args: arguments,
		RunE: func(cmd *cobra.Command, _ []string) error { return f.run(cmd) },
	}
	flags := cmd.Flags()
	flags.StringVar(&f.trace, "trace", "", "recorded arrivals: CSV with the columns arrived and, where known, service_seconds")
	flags.StringVar(&f.poisson, "poisson", "", "independent arrivals, so many a second")
	flags.StringVar(&f.bursty, "bursty", "", "bursts: LOW,HIGH,ON,OFF (rates a second, mean length of a burst and between two)")
	flags.StringVar(&f.diurnal, "diurnal", "", "days: LOW,HIGH,PERIOD (rates a second, length of a day)")
	flags.StringVar(&f.service, "service", "exp:15s", "how long a claim keeps its machine")
	flags.StringVar(&f.restore, "restore", "const:200ms", "how long making a machine takes (with --no-pool: const:0s)")
	flags.StringVar(&f.settle, "settle", "const:10ms", "how long a claimed machine takes until it works, as a part of the service time")
	flags.StringVar(&f.destroy, "destroy", "const:0s", "how long destroying a machine takes")
	flags.DurationVar(&f.maxWait, "max-wait", -1, "how long a claim waits before it gives up (negative: for ever)")
	flags.IntVar(&f.arrivals, "arrivals", 100_000, "claims to play (a trace ends earlier)")
	flags.Uint64Var(&f.seed, "seed", 1, "of the random numbers; the same seed gives the same result")
	flags.BoolVar(&f.noPool, "no-pool", false, "keep no machine ready: each is made when it is claimed")
	flags.IntVar(&f.machines, "machines", 0, "machines alive at once (default: EPHEMERAL_POOL_MAX_MACHINES)")
	flags.IntVar(&f.minReady, "min-ready", 0, "machines kept ready (default: EPHEMERAL_POOL_MIN_READY)")
	flags.IntVar(&f.maxReady, "max-ready", 0, "most machines ready (default: EPHEMERAL_POOL_MAX_READY, and not below --min-ready)")
	flags.IntVar(&f.refillConcurrency, "refill-concurrency", 0, "machines made at once (default: EPHEMERAL_POOL_REFILL_CONCURRENCY)")
	flags.Var((*share)(&f.scaleTo), "scale-to", "target miss rate of a pool that scales itself, as 1% or 0.01 (default: EPHEMERAL_POOL_TARGET_MISS_RATE)")
	flags.Var((*share)(&f.failures), "restore-failures", "share of makes that fail, as 1% or 0.01")
	flags.IntVar(&f.memory, "memory", 0, "MiB of a machine in use (default: EPHEMERAL_MACHINE_MEMORY_MIB)")
	flags.IntVar(&f.readyMemory, "ready-memory", 0, "MiB of a machine that rests ready (default: --memory)")
	flags.StringVar(&f.wantMisses, "want-misses", "", "goal: at most this share of claims finds no machine ready, as 1% or 0.01")
	flags.StringVar(&f.wantWait, "want-wait", "", "goal: the wait at --percentile is at most this long")
	flags.Float64Var(&f.percentile, "percentile", 95, "percent of the claims that --want-wait is about")
	flags.StringVar(&f.memoryLimit, "memory-limit", "", "goal: all machines together keep to this memory, as 16GiB or in MiB")
	flags.StringVar(&f.plots, "plot", "", "directory for SVG plots")
	flags.StringVar(&f.writeTrace, "write-trace", "", "also write the workload as a trace, to be read with --trace")
	f.output.flag(cmd)
	cmd.MarkFlagsMutuallyExclusive("trace", "poisson", "bursty", "diurnal")
	cmd.MarkFlagsOneRequired("trace", "poisson", "bursty", "diurnal")
	for _, goal := range []string{"want-misses", "want-wait"} {
		cmd.MarkFlagsMutuallyExclusive("no-pool", goal)
	}
	for _, size := range []string{"min-ready", "max-ready", "scale-to"} {
		cmd.MarkFlagsMutuallyExclusive("no-pool", size)
	}
	return cmd
}

func (f *simulateFlags) run(cmd *cobra.Command) error {
	cfg, err := f.config(cmd)
	if err != nil {
		return err
	}
	goal, err := f.goal()
	if err != nil {
		return err
	}
	if f.writeTrace != "" {
		if err := writeTrace(f.writeTrace, cfg.Workload); err != nil {
			return err
		}
	}
	out := simulated{Workload: f.describe()}
	if out.Result, err = simulate.Run(cmd.Context(), cfg); err != nil {
		return err
	}
	if goal != nil {
		r, err := simulate.Recommend(cmd.Context(), cfg, *goal)
		if err != nil {
			return err
		}
		out.Recommendation, out.Settings = &r, settingsOf(r.Policy.Config())
	}
	if f.plots != "" {
		if out.Plots, err = writePlots(f.plots, out); err != nil {
			return err
		}
	}
	return f.output.print(cmd, out, func(w io.Writer) { writeSimulated(w, out) })
}

// config is what is simulated: a node's settings, with the flags before them.
func (f *simulateFlags) config(cmd *cobra.Command) (simulate.Config, error) {
	s, err := load()
	if err != nil {
		return simulate.Config{}, err
	}
	set := cmd.Flags().Changed
	cfg := simulate.Config{Pool: f.pool(s.Pool, set), MaxWait: f.maxWait, FailureRate: f.failures, MemoryMiB: s.Provision.MemoryMiB}
	if set("memory") {
		cfg.MemoryMiB = f.memory
	}
	cfg.ReadyMemoryMiB = cfg.MemoryMiB
	if set("ready-memory") {
		cfg.ReadyMemoryMiB = f.readyMemory
	}
	if f.noPool && !set("restore") {
		f.restore = "const:0s"
	}
	cfg.Workload = workload.Workload{Count: f.arrivals, Seed: f.seed}
	var errs [5]error
	cfg.Workload.Service, errs[0] = workload.ParseDist(f.service)
	cfg.Restore, errs[1] = workload.ParseDist(f.restore)
	cfg.Settle, errs[2] = workload.ParseDist(f.settle)
	cfg.Destroy, errs[3] = workload.ParseDist(f.destroy)
	errs[4] = f.process(&cfg.Workload, set)
	return cfg, errors.Join(errs[:]...)
}

// pool is the pool's configuration.
func (f *simulateFlags) pool(cfg pool.Config, set func(string) bool) pool.Config {
	if set("machines") {
		cfg.MaxMachines = f.machines
	}
	if set("refill-concurrency") {
		cfg.RefillConcurrency = f.refillConcurrency
	}
	if f.noPool {
		none := pool.Config{MaxMachines: cfg.MaxMachines, RefillConcurrency: cfg.RefillConcurrency, MakeTimeout: cfg.MakeTimeout}
		if !set("refill-concurrency") {
			none.RefillConcurrency = max(1, none.MaxMachines)
		}
		return none
	}
	if set("min-ready") {
		cfg.MinReady = f.minReady
	}
	cfg.MaxReady = max(cfg.MaxReady, cfg.MinReady)
	if set("max-ready") {
		cfg.MaxReady = f.maxReady
	}
	if set("scale-to") {
		cfg.Autoscale.TargetMissRate = f.scaleTo
	}
	return cfg
}

// process puts the arrivals into the workload.
func (f *simulateFlags) process(w *workload.Workload, set func(string) bool) (err error) {
	switch {
	case f.poisson != "":
		w.Process, err = workload.ParsePoisson(f.poisson)
	case f.bursty != "":
		w.Process, err = workload.ParseBursty(f.bursty)
	case f.diurnal != "":
		w.Process, err = workload.ParseDiurnal(f.diurnal)
	default:
		return f.readTrace(w, set)
	}
	if err != nil {
		return fmt.Errorf("arrivals: %w", err)
	}
	return nil
}

func (f *simulateFlags) readTrace(w *workload.Workload, set func(string) bool) error {
	file, err := os.Open(f.trace)
	if err != nil {
		return fmt.Errorf("open the trace: %w", err)
	}
	defer file.Close() // only read from
	t, err := trace.Read(file)
	if err != nil {
		return fmt.Errorf("%s: %w", f.trace, err)
	}
	w.Given, w.ServiceGiven = t.Arrivals, t.Service && !set("service")
	if !set("arrivals") {
		w.Count = len(t.Arrivals)
	}
	return nil
}

// writeTrace writes a workload as a trace.
func writeTrace(path string, w workload.Workload) error {
	t := trace.Trace{Service: true}
	next := w.Start()
	for a, ok := next(); ok; a, ok = next() {
		t.Arrivals = append(t.Arrivals, a)
	}
	file, err := os.Create(path)
	if err != nil {
		return fmt.Errorf("write the trace: %w", err)
	}
	return errors.Join(trace.Write(file, t), file.Close())
}

// goal is what a policy is searched for; nil: none is.
func (f *simulateFlags) goal() (*simulate.Goal, error) {
	if f.wantMisses == "" && f.wantWait == "" {
		if f.memoryLimit != "" {
			return nil, errors.New("--memory-limit limits a search: add --want-misses or --want-wait")
		}
		return nil, nil
	}
	g := simulate.Goal{MissRate: -1, Wait: -1, Share: f.percentile / 100}
	var err error
	if f.wantMisses != "" {
		if g.MissRate, err = parseShare(f.wantMisses); err != nil {
			return nil, fmt.Errorf("--want-misses: %w", err)
		}
	}
	if f.wantWait != "" {
		if g.Wait, err = workload.ParseDuration(f.wantWait); err != nil {
			return nil, fmt.Errorf("--want-wait: %w", err)
		}
	}
	if f.memoryLimit != "" {
		if g.Memory, err = parseMiB(f.memoryLimit); err != nil {
			return nil, fmt.Errorf("--memory-limit: %w", err)
		}
	}
	return &g, nil
}

func (f *simulateFlags) describe() string {
	for name, value := range map[string]string{"trace": f.trace, "poisson": f.poisson, "bursty": f.bursty, "diurnal": f.diurnal} {
		if value != "" {
			return name + " " + value
		}
	}
	return ""
}

// share is a flag that takes 1% or 0.01.
type share float64

func (s *share) String() string { return strconv.FormatFloat(float64(*s), 'g', -1, 64) }
func (s *share) Type() string   { return "share" }

func (s *share) Set(text string) error {
	v, err := parseShare(text)
	*s = share(v)
	return err
}

func parseShare(s string) (float64, error) {
	number, percent := strings.CutSuffix(s, "%")
	v, err := strconv.ParseFloat(number, 64)
	if percent {
		v /= 100
	}
	if err != nil || !(v >= 0 && v < 1) {
		return 0, fmt.Errorf("%.40q: want a share such as 1%% or 0.01, below 1", s)
	}
	return v, nil
}

// parseMiB reads 16GiB, 512MiB or a number of MiB.
func parseMiB(s string) (int, error) {
	number, factor := s, 1.0
	for suffix, f := range map[string]float64{"MiB": 1, "GiB": 1 << 10, "TiB": 1 << 20} {
		if n, ok := strings.CutSuffix(s, suffix); ok {
			number, factor = n, f
		}
	}
	v, err := strconv.ParseFloat(strings.TrimSpace(number), 64)
	if v *= factor; err != nil || !(v >= 1 && v <= math.MaxInt32) {
		return 0, fmt.Errorf("%.40q: want memory such as 16GiB or 512MiB", s)
	}
	return int(v), nil
}

// settingsOf is a policy as a node's settings.
func settingsOf(cfg pool.Config) map[string]string {
	settings := map[string]string{
		"EPHEMERAL_POOL_MIN_READY":          strconv.Itoa(cfg.MinReady),
		"EPHEMERAL_POOL_MAX_READY":          strconv.Itoa(cfg.MaxReady),
		"EPHEMERAL_POOL_MAX_MACHINES":       strconv.Itoa(cfg.MaxMachines),
		"EPHEMERAL_POOL_REFILL_CONCURRENCY": strconv.Itoa(cfg.RefillConcurrency),
		"EPHEMERAL_POOL_TARGET_MISS_RATE":   strconv.FormatFloat(cfg.Autoscale.TargetMissRate, 'g', -1, 64),
	}
	return settings
}

// writePlots writes the plots into a directory and returns their paths.
func writePlots(dir string, out simulated) ([]string, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, fmt.Errorf("make the directory of plots: %w", err)
	}
	var paths []string
	plot := func(name string, draw func(io.Writer) error) error {
		path := filepath.Join(dir, name)
		file, err := os.Create(path)
		if err != nil {
			return fmt.Errorf("write a plot: %w", err)
		}
		paths = append(paths, path)
		return errors.Join(draw(file), file.Close())
	}
	err := errors.Join(
		plot("pool.svg", func(w io.Writer) error { return chart.Pool(w, out.Result) }),
		plot("waits.svg", func(w io.Writer) error { return chart.Waits(w, out.Result) }))
	if r := out.Recommendation; r != nil {
		err = errors.Join(err, plot("trade-off.svg", func(w io.Writer) error { return chart.TradeOff(w, *r) }))
	}
	return paths, err
}
