package qemu_test

import (
	"context"
	"testing"
	"time"

	"github.com/ephemeral-run/ephemeral/vmm"
	"github.com/ephemeral-run/ephemeral/vmm/vmmtest"
)

// BenchmarkBoot compares a cold boot by the driver with a bare command line, taking turns, so that both see the same host.
func BenchmarkBoot(b *testing.B) {
	c := config()
	d := driver(b, c)
	h := vmmtest.Harness{Driver: d, Image: vmmtest.Image(b)}
	shape := vmm.Shape{VCPUs: 1, MemoryMiB: 512}
	bare := vmmtest.Bare{QEMU: c.Path, KVM: d.Isolation() == vmm.KVM, TBSize: c.TBSize, Image: h.Image, Shape: shape}
	compare(b, func(ctx context.Context) (vmmtest.Times, error) { return h.TimeBoot(ctx, b) }, bare.ColdBoot)
}

// BenchmarkRestore compares clones likewise.
func BenchmarkRestore(b *testing.B) {
	c := config()
	d := driver(b, c)
	h := vmmtest.Harness{Driver: d, Image: vmmtest.Image(b)}
	t := h.MakeTemplate(b, b.TempDir())
	bare := vmmtest.Bare{QEMU: c.Path, KVM: d.Isolation() == vmm.KVM, TBSize: c.TBSize, Image: t.Image, Shape: t.Shape}
	compare(b,
		func(ctx context.Context) (vmmtest.Times, error) { return h.TimeClone(ctx, b, t) },
		func(ctx context.Context) (vmmtest.Times, error) { return bare.Restore(ctx, t) })
}

// compare reports medians in milliseconds.
func compare(b *testing.B, driver, bare func(context.Context) (vmmtest.Times, error)) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	ready, exec := make(map[string][]time.Duration), make(map[string][]time.Duration)
	for b.Loop() {
		for name, run := range map[string]func(context.Context) (vmmtest.Times, error){"": driver, "bare-": bare} {
			got, err := run(ctx)
			if err != nil {
				b.Fatal(err)
			}
			ready[name], exec[name] = append(ready[name], got.Ready), append(exec[name], got.Exec)
		}
	}
	for name := range ready {
		b.ReportMetric(float64(vmmtest.Median(ready[name]).Microseconds())/1000, name+"ready-ms")
		b.ReportMetric(float64(vmmtest.Median(exec[name]).Microseconds())/1000, name+"exec-ms")
	}
}
