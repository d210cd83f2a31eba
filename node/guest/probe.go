package guest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/ephemeral-run/ephemeral/vmm"
)

// warmTimeout bounds one warming command: interpreters start slowly in an emulated machine that has just
// booted. On a busy host it is longer; see vmm.Patience.
const warmTimeout = 60 * time.Second

// Probe runs one real command in a machine that is not prepared yet. It proves that the machine works, and brings in the
// memory and the code that the next command needs.
func Probe(ctx context.Context, m vmm.Machine) error {
	if err := warm(ctx, Connect(m.Dial), "/bin/true"); err != nil {
		return fmt.Errorf("probe: %w", err)
	}
	return nil
}

// PrepareClone prepares a clone with an identity of its own, before anybody claims it: all that is left then is its clock.
// That is set here too, so that the memory and the code that it needs are there, over the connection that is kept for it. All
// goes over this one: the machine rests next, and would have the end of another to answer when it wakes.
func PrepareClone(ctx context.Context, m vmm.Machine) (vmm.Clock, error) {
	id, err := newIdentity(m.ID())
	if err != nil {
		return nil, err
	}
	clock, err := Connect(m.Dial).Clock(ctx)
	if err != nil {
		return nil, err
	}
	if _, err = clock.k.prepare(ctx, id); err == nil {
		err = clock.Set(ctx)
	}
	if err != nil {
		return nil, errors.Join(err, clock.Close())
	}
	return clock, nil
}

// warmers are the programs that runs use most. Having been run once, they are in the template's page cache.
var warmers = [][]string{
	{"/bin/sh", "-c", "true"},
	{"/bin/bash", "-c", "true"},
	{"python3", "-c", "import json, os, subprocess, sys"},
	{"curl", "--version"},
	{"git", "--version"},
	{"jq", "--version"},
}

// whereFound runs a program where the image has it; "/bin/sh" it has in any case.
const whereFound = `command -v "$1" >/dev/null 2>&1 || exit 0; exec "$@"`

// Warm runs the common programs once, those that the image has, for a template to be made of the machine.
func Warm(ctx context.Context, m vmm.Machine) error {
	client := Connect(m.Dial)
	for _, args := range warmers {
		if err := warm(ctx, client, append([]string{"/bin/sh", "-c", whereFound, "sh"}, args...)...); err != nil {
			return fmt.Errorf("warm: %w", err)
		}
	}
	return nil
}

func warm(ctx context.Context, c *Client, args ...string) error {
	var stderr bytes.Buffer
	exit, err := c.Exec(ctx, Command{Args: args, Warming: true, Timeout: time.Duration(vmm.Patience() * float64(warmTimeout)), OutputLimit: maxDetail}, nil, &stderr)
	if err != nil {
		return err
	}
	if exit.Outcome != "exited" || exit.Code != 0 {
		return fmt.Errorf("%s: %s with code %d: %s %q", strings.Join(args, " "), exit.Outcome, exit.Code, exit.Detail, stderr.String())
	}
	return nil
}
