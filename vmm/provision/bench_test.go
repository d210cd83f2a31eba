package provision_test

import (
	"context"
	"os"
	"testing"
	"time"

	"github.com/ephemeral-run/ephemeral/vmm"
	"github.com/ephemeral-run/ephemeral/vmm/network"
	"github.com/ephemeral-run/ephemeral/vmm/provision"
	"github.com/ephemeral-run/ephemeral/vmm/vmmtest"
)

// BenchmarkCreate makes machines, and by turns restores the same template by a bare command line with no jail and no
// tap of its own, until both have run a command. It reports the medians and their ratio.
func BenchmarkCreate(b *testing.B) {
	dir := reachable(b)
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	p, tmpl, _, end, err := openReal(ctx, dir, func(string) {})
	if err != nil {
		b.Fatal(err)
	}
	defer func() {
		if err := end(); err != nil {
			b.Error(err)
		}
	}()
	net, err := network.Open(ctx, "provision-bench")
	if err != nil {
		b.Fatal(err)
	}
	defer func() {
		if err := net.Close(); err != nil {
			b.Error(err)
		}
	}()
	tap, err := net.NewTap("0123456789ab", 20000)
	if err != nil {
		b.Fatal(err)
	}
	bare := vmmtest.Bare{
		QEMU: "qemu-system-x86_64", TBSize: 64, Image: tmpl.Image, Shape: tmpl.Shape,
		NIC: &vmm.NIC{Tap: tap.Name, MAC: tap.MAC, File: tap.File},
	}
	if path := os.Getenv("EPHEMERAL_QEMU"); path != "" {
		bare.QEMU = path
	}
	steps := map[string][]time.Duration{}
	var ours, theirs, closing []time.Duration
	for b.Loop() {
		start := time.Now()
		m, err := p.Create(ctx, tmpl)
		if err != nil {
			b.Fatal(err)
		}
		ours = append(ours, time.Since(start))
		for _, s := range m.Steps() {
			steps[s.Name] = append(steps[s.Name], s.Duration)
		}
		start = time.Now()
		if err := m.Close(); err != nil {
			b.Fatal(err)
		}
		closing = append(closing, time.Since(start))
		times, err := bare.Restore(ctx, tmpl)
		if err != nil {
			b.Fatal(err)
		}
		theirs = append(theirs, times.Exec)
	}
	report := func(d []time.Duration, name string) { b.ReportMetric(median(d).Seconds()*1000, name) }
	for _, name := range []string{provision.StepLaunch, provision.StepLoad, provision.StepResume, provision.StepProbe, provision.StepRest} {
		report(steps[name], name+"-ms")
	}
	report(ours, "create-ms")
	report(theirs, "bare-ms")
	report(closing, "close-ms")
	b.ReportMetric(median(ours).Seconds()/median(theirs).Seconds(), "ratio")
}
