package qemu_test

import (
	"context"
	"testing"
	"time"

	"github.com/ephemeral-run/ephemeral/vmm"
	"github.com/ephemeral-run/ephemeral/vmm/vmmtest"
)

// BenchmarkRestore compares the driver with a bare command line, taking turns, so that both see the same host.
func BenchmarkRestore(b *testing.B) {
	c := config()
	d := driver(b, c)
	h := vmmtest.Harness{Driver: d, Image: image(b)}
	t := h.MakeTemplate(b, b.TempDir())
	bare := vmmtest.Bare{QEMU: c.Path, KVM: d.Isolation() == vmm.KVM, TBSize: c.TBSize, Image: t.Image, Shape: t.Shape}
	var times struct{ ready, exec, bareReady, bareExec []time.Duration }
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	for b.Loop() {
		got, err := h.TimeClone(ctx, b, t)
		if err != nil {
			b.Fatal(err)
		}
		times.ready, times.exec = append(times.ready, got.Ready), append(times.exec, got.Exec)
		if got, err = bare.Restore(ctx, t); err != nil {
			b.Fatal(err)
		}
		times.bareReady, times.bareExec = append(times.bareReady, got.Ready), append(times.bareExec, got.Exec)
	}
	report := func(name string, values []time.Duration) {
		b.ReportMetric(float64(vmmtest.Median(values).Microseconds())/1000, name)
	}
	report("ready-ms", times.ready)
	report("exec-ms", times.exec)
	report("bare-ready-ms", times.bareReady)
	report("bare-exec-ms", times.bareExec)
}
