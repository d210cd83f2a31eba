package main

import (
	"context"
	"errors"
	"os"
	"time"

	"github.com/caarlos0/env/v11"

	"github.com/ephemeral-run/ephemeral/images"
	"github.com/ephemeral-run/ephemeral/node/guest"
	"github.com/ephemeral-run/ephemeral/vmm"
	"github.com/ephemeral-run/ephemeral/vmm/cloudhypervisor"
	"github.com/ephemeral-run/ephemeral/vmm/network"
	"github.com/ephemeral-run/ephemeral/vmm/provision"
	"github.com/ephemeral-run/ephemeral/vmm/vmmtest"
)

// answered notes when the machine that is being made first answers.
type answered struct{ at time.Time }

func (a *answered) probe(ctx context.Context, m vmm.Machine) error {
	if err := guest.Connect(m.Dial).Ping(ctx); err != nil {
		return err
	}
	a.at = time.Now()
	return guest.Probe(ctx, m)
}

// kvmMachines measures machines of Cloud Hypervisor beside those that a person makes by hand: how long a clone takes, and
// how long a resting one takes to answer.
func kvmMachines(ctx context.Context, o options, data string) (rows []row, err error) {
	s, err := env.ParseAs[struct {
		Provision       provision.Config
		CloudHypervisor cloudhypervisor.Config
	}]()
	if err != nil {
		return nil, err
	}
	s.Provision.DataDir = data
	s.Provision.TemplateTimeout = 10 * time.Minute // KVM itself may be emulated
	image, err := images.Open(o.image)
	if err != nil {
		return nil, err
	}
	driver, err := cloudhypervisor.New(s.CloudHypervisor)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, driver.Close()) }()
	program, err := cloudhypervisor.Find(s.CloudHypervisor)
	if err != nil {
		return nil, err
	}
	var first answered
	parts, err := provision.New(ctx, s.Provision, driver, provision.Agent{Probe: first.probe, Warm: guest.Warm, Prepare: guest.PrepareClone})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, parts.Close()) }()
	say("making the template")
	template, err := parts.Template(ctx, image, s.Provision.Shape(), nil)
	if err != nil {
		return nil, err
	}
	bare := vmmtest.BareCloudHypervisor{Program: program.Path}
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
	bare.NIC = &vmm.NIC{Tap: tap.Name, MAC: tap.MAC, File: tap.File}

	var answers, restores, refillAnswers, refills []time.Duration
	_, err = repeat(ctx, o.rounds, "restore, bare and ours in turns", func() (time.Duration, error) {
		b, err := bare.Restore(ctx, template)
		if err != nil {
			return 0, err
		}
		answers, restores = append(answers, b.Ready), append(restores, b.Exec)
		began := time.Now()
		m, err := parts.Create(ctx, template)
		if err != nil {
			return 0, err
		}
		refills, refillAnswers = append(refills, time.Since(began)), append(refillAnswers, first.at.Sub(began))
		return 0, errors.Join(m.Close(), restocked(ctx, parts, template, s.Provision.Spares))
	})
	if err != nil {
		return nil, err
	}
	resumes, err := resume(ctx, o, template, parts)
	if err != nil {
		return nil, err
	}
	answer := measured("pool.answer", "ms", refillAnswers)
	answer.Baseline, answer.mostRatio = "vm.answer", 1.3
	refill := measured("pool.refill", "ms", refills)
	refill.Baseline, refill.mostRatio = "vm.restore", 1.3
	resumed := measured("vm.resume", "ms", resumes)
	resumed.Baseline, resumed.mostRatio = "vm.answer", 0.1
	return []row{measured("vm.answer", "ms", answers), measured("vm.restore", "ms", restores), answer, refill, resumed}, nil
}

// restocked waits until as many empty processes are in hand as are to be, so that neither side pays for their launch.
func restocked(ctx context.Context, parts *provision.Provisioner, t vmm.Template, spares int) error {
	for deadline := time.Now().Add(time.Minute); parts.Spares(t) < spares; {
		if time.Now().After(deadline) {
			return errors.New("no spare is launched")
		}
		if err := settle(ctx); err != nil {
			return err
		}
	}
	return settle(ctx)
}

// settle lets what goes on in the background come to its end.
func settle(ctx context.Context) error {
	select {
	case <-time.After(time.Second):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// resume measures from the resume of a machine that rests, paused, to its first answer.
func resume(ctx context.Context, o options, t vmm.Template, parts *provision.Provisioner) (_ []time.Duration, err error) {
	m, err := parts.Create(ctx, t)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, m.Close()) }()
	if err := m.Rested(ctx); err != nil {
		return nil, err
	}
	agent := vmmtest.NewAgent(m.Dial)
	return repeat(ctx, o.rounds, "resume", func() (time.Duration, error) {
		if err := errors.Join(m.Pause(ctx), settle(ctx)); err != nil {
			return 0, err
		}
		began := time.Now()
		if err := m.Resume(ctx); err != nil {
			return 0, err
		}
		if err := agent.Ping(ctx); err != nil {
			return 0, err
		}
		return time.Since(began), nil
	})
}

// kvm measures on KVM alone.
func kvm(ctx context.Context, o options) (err error) {
	data, err := os.MkdirTemp("", "eph-bench-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(data)) }()
	if err := os.Chmod(data, 0o711); err != nil { // machines run as other users, who have to pass through
		return err
	}
	rows, err := kvmMachines(ctx, o, data)
	if err != nil {
		return err
	}
	return conclude(o, rows)
}
