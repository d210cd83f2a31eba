package kvmbox

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"
)

// Bench is what `make bench-kvm` runs: the measurements of test/bench on KVM, all in one place.
type Bench struct {
	Root            string // the checkout
	Dir             string // of what boxes are made from
	ImageDir        string // directory of images, which has "base"
	CloudHypervisor string // its program; empty: as Suite finds it
	Box             bool   // take a box even where this host's KVM serves
	Limit           time.Duration
	Rounds          int    // how often each is measured
	Output          string // file for the rows
	Progress        func(message string)
}

// Run measures and writes the rows. It fails when a number does not hold its bar; the rows are written then too.
func (b *Bench) Run(ctx context.Context) error {
	s := Suite{Root: b.Root, Dir: b.Dir, ImageDir: b.ImageDir, CloudHypervisor: b.CloudHypervisor, Box: b.Box, Progress: b.Progress}
	if missing := s.findCloudHypervisor(); missing != "" {
		return errors.New(missing)
	}
	var err error
	if s.ImageDir, err = filepath.Abs(s.ImageDir); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, b.Limit, fmt.Errorf("the measurements did not end within %v", b.Limit))
	defer cancel()
	s.Only = []string{"bench"} // no tests
	carry, err := s.carry(ctx)
	if err != nil {
		return err
	}
	program := filepath.Join(s.Dir, "bench")
	b.Progress("building the measurements")
	if err := Build(ctx, s.Root, "./test/bench", program); err != nil {
		return err
	}
	carry["bin/bench"] = program
	var record Record
	return s.inPlace(ctx, carry, &record, func(place Place) error {
		b.Progress("measuring in " + place.Describe())
		return b.measure(ctx, place, s.environment(place))
	})
}

func (b *Bench) measure(ctx context.Context, place Place, env []string) error {
	const rows = "/tmp/ephemeral-bench-kvm.json"
	image := place.Path(imageName)
	if !place.Boxed() {
		image = filepath.Join(b.ImageDir, "base")
	}
	code, err := place.Run(ctx, Command{
		Args: []string{place.Path("bin/bench"), "-kvm", "-output", rows, "-image", image, "-rounds", strconv.Itoa(b.Rounds)},
		Env:  env, Dir: "/tmp", Stdout: os.Stdout, Stderr: os.Stderr,
	})
	if err != nil {
		return err
	}
	content, err := place.ReadFile(ctx, rows, recordLimit)
	if err == nil {
		err = os.WriteFile(b.Output, content, 0o644)
	}
	if code != 0 {
		err = errors.Join(fmt.Errorf("the measurements ended with code %d", code), err)
	}
	return err
}
