package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"time"

	"github.com/caarlos0/env/v11"

	"github.com/ephemeral-run/ephemeral/images"
	"github.com/ephemeral-run/ephemeral/node/guest"
	"github.com/ephemeral-run/ephemeral/vmm"
	"github.com/ephemeral-run/ephemeral/vmm/network"
	"github.com/ephemeral-run/ephemeral/vmm/pool"
	"github.com/ephemeral-run/ephemeral/vmm/provision"
	"github.com/ephemeral-run/ephemeral/vmm/qemu"
	"github.com/ephemeral-run/ephemeral/vmm/vmmtest"
)

// settings are those of the product, with its defaults.
type settings struct {
	Provision provision.Config
	Pool      pool.Config
	QEMU      qemu.Config
}

func newSettings(data string) (settings, error) {
	s, err := env.ParseAs[settings]()
	s.Provision.DataDir = data
	return s, err
}

// say tells what is measured.
func say(format string, args ...any) { fmt.Fprintf(os.Stderr, format+"\n", args...) }

// machines measures cold boot, restore, refill and claim. Bare and ours take turns, so that whatever else the host does
// falls on both alike.
func machines(ctx context.Context, o options, data string) (rows []row, err error) {
	s, err := newSettings(data)
	if err != nil {
		return nil, err
	}
	image, err := images.Open(o.image)
	if err != nil {
		return nil, err
	}
	driver, err := qemu.New(s.QEMU)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, driver.Close()) }()
	parts, err := provision.New(ctx, s.Provision, driver, provision.Agent{Probe: guest.Probe, Warm: guest.Warm, Prepare: guest.PrepareClone})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, parts.Close()) }()
	say("making the template")
	template, err := parts.Template(ctx, image, s.Provision.Shape(), nil)
	if err != nil {
		return nil, err
	}
	net, err := network.Open(ctx, "bench")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, net.Close()) }()
	tap, err := net.NewTap("be0c00000000", 65534)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, tap.Close()) }()
	equal, err := newShare("ephemeral-bench", s.Provision.Jail.CPUWeight)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, equal.remove()) }()
	bare := vmmtest.Bare{
		Started: equal.add,
		QEMU:    s.QEMU.Path, KVM: driver.Isolation() == vmm.KVM, TBSize: s.QEMU.TBSize, Image: image, Shape: s.Provision.Shape(),
		NIC: &vmm.NIC{Tap: tap.Name, MAC: tap.MAC, File: tap.File}, Private: os.Geteuid() != 0,
	}

	boots, err := repeat(ctx, max(o.rounds/4, 3), "cold boot, bare", func() (time.Duration, error) {
		t, err := bare.ColdBoot(ctx)
		return t.Exec, err
	})
	if err != nil {
		return nil, err
	}
	restores, refills, rests, err := restoreAndRefill(ctx, o, bare, template, parts)
	if err != nil {
		return nil, err
	}
	claims, err := claim(ctx, o, s.Pool, template, parts)
	if err != nil {
		return nil, err
	}
	refill := measured("pool.refill", "ms", refills)
	refill.Baseline, refill.mostRatio = "vm.restore", 1.15
	claimed := measured("pool.claim", "ms", claims)
	claimed.most = 0.1
	rest, err := resting(ctx, bare, template, parts)
	if err != nil {
		return nil, err
	}
	predicted, err := predictions(ctx, template, parts)
	if err != nil {
		return nil, err
	}
	rest = append(rest, predicted...)
	return append([]row{measured("vm.cold_boot", "ms", boots), measured("vm.restore", "ms", restores), refill, measured("pool.rested", "ms", rests), claimed}, rest...), nil
}

// restoreAndRefill measures in turns a bare restore and a machine made for the pool, each from nothing to a command that
// the agent has run: ready means the same for both. rests is from nothing until ours is prepared and at rest, during
// which it can be claimed.
func restoreAndRefill(ctx context.Context, o options, bare vmmtest.Bare, t vmm.Template, parts *provision.Provisioner) (restores, refills, rests []time.Duration, err error) {
	first, err := parts.Create(ctx, t) // after which there is a spare, as in a pool that refills
	if err != nil {
		return nil, nil, nil, err
	}
	if err := errors.Join(first.Close(), spare(ctx, parts, t)); err != nil {
		return nil, nil, nil, err
	}
	_, err = repeat(ctx, o.rounds, "restore, bare and ours in turns", func() (time.Duration, error) {
		b, err := bare.Restore(ctx, t)
		if err != nil {
			return 0, fmt.Errorf("bare restore: %w", err)
		}
		restores = append(restores, b.Exec)
		began := time.Now()
		m, err := parts.Create(ctx, t)
		if err != nil {
			return 0, err
		}
		refills = append(refills, time.Since(began))
		if err := m.Rested(ctx); err != nil {
			return 0, errors.Join(err, m.Close())
		}
		rests = append(rests, time.Since(began))
		if err := m.Close(); err != nil {
			return 0, err
		}
		return 0, spare(ctx, parts, t)
	})
	return restores, refills, rests, err
}

// claim measures claims on a pool that has machines ready.
func claim(ctx context.Context, o options, cfg pool.Config, t vmm.Template, parts *provision.Provisioner) (claims []time.Duration, err error) {
	machines, err := pool.New(cfg, func(ctx context.Context) (*provision.Machine, error) { return parts.Create(ctx, t) },
		pool.WithLogger(slog.New(slog.DiscardHandler)))
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, machines.Close()) }()
	return repeat(ctx, o.rounds, "claim", func() (time.Duration, error) {
		for machines.Stats().Ready < cfg.MinReady {
			select {
			case <-ctx.Done():
				return 0, ctx.Err()
			case <-time.After(10 * time.Millisecond):
			}
		}
		began := time.Now()
		m, err := machines.Claim(ctx)
		took := time.Since(began)
		if err != nil {
			return 0, err
		}
		machines.Settled(m)
		err = m.Close()
		machines.Released(m)
		return took, err
	})
}

// repeat measures n times.
func repeat(ctx context.Context, n int, what string, once func() (time.Duration, error)) ([]time.Duration, error) {
	say("%s: %d times", what, n)
	var all []time.Duration
	for range n {
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		d, err := once()
		if err != nil {
			return nil, fmt.Errorf("%s: %w", what, err)
		}
		all = append(all, d)
	}
	return all, nil
}

// measured makes a row of durations: median and 95th percentile, in milliseconds.
func measured(name, unit string, d []time.Duration) row {
	d = slices.Clone(d)
	slices.Sort(d)
	at := func(q float64) float64 {
		if len(d) == 0 {
			return 0
		}
		return float64(d[min(int(q*float64(len(d))), len(d)-1)].Microseconds()) / 1000
	}
	return row{Name: name, Value: at(0.5), P95: at(0.95), Unit: unit, Samples: len(d)}
}
