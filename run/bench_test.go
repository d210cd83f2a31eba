package run

import (
	"fmt"
	"testing"
)

func BenchmarkAdmit(b *testing.B) {
	f := newFixture(b, func(c *Config) { c.QueueLimit = 1 << 30 })
	f.newOrg("o", 0, 1<<50)
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			_, _, err := f.Admit(f.ctx, Admission{Org: "o", IdempotencyKey: word(8), Fingerprint: "f",
				Spec: Spec{Command: "true", MaxCostMicros: 1, TimeoutSeconds: 10}})
			if err != nil {
				b.Error(err)
				return
			}
		}
	})
}

func BenchmarkReplay(b *testing.B) {
	f := newFixture(b)
	f.newOrg("o", 0, 1<<50)
	a := Admission{Org: "o", IdempotencyKey: "k", Fingerprint: "f", Spec: Spec{Command: "true", MaxCostMicros: 1}}
	for b.Loop() {
		if _, _, err := f.Admit(f.ctx, a); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkTake takes from queues of different lengths: the cost must not grow with them.
func BenchmarkTake(b *testing.B) {
	for _, waiting := range []int{100, 10_000, 100_000} {
		b.Run(fmt.Sprintf("waiting=%d", waiting), func(b *testing.B) {
			f := newFixture(b, func(c *Config) { c.QueueLimit, c.Concurrency = 1<<30, 1<<30 })
			for i := range 10 {
				f.newOrg(fmt.Sprintf("o%d", i), 0, 1<<50)
			}
			for i := range waiting {
				f.admit(fmt.Sprintf("o%d", i%10), 1)
			}
			for b.Loop() {
				l, err := f.tryTake(f.ctx, "n1")
				if err != nil || l == nil {
					b.Fatal(l, err)
				}
				b.StopTimer()
				if err := f.Requeue(f.ctx, l); err != nil {
					b.Fatal(err)
				}
				b.StartTimer()
			}
		})
	}
}

// BenchmarkSettle runs a whole life without a machine, from admission to settlement.
func BenchmarkSettle(b *testing.B) {
	f := newFixture(b)
	f.newOrg("o", 0, 1<<50)
	for i := 0; b.Loop(); i++ {
		if err := f.oneRun(fmt.Sprint(i)); err != nil {
			b.Fatal(err)
		}
	}
}
