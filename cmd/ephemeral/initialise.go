package main

import (
	"context"
	"fmt"
	"io"
	"slices"

	"github.com/ephemeral-run/ephemeral/run"
)

// firstCredit is what the first organisation starts with: ten dollars of the operator's own money.
const firstCredit run.Micros = 10_000_000

// firstOrg is the id of that organisation.
const firstOrg = "org_default"

// initialise makes a new cell usable: an organisation with credit, a member key and an admin key, printed once. Each step
// may be repeated, so a start that was interrupted is carried on by the next.
func initialise(ctx context.Context, c *cell, w io.Writer) error {
	orgs, err := c.store.Orgs(ctx)
	if err != nil {
		return fmt.Errorf("look for organisations: %w", err)
	}
	if len(orgs) > 0 && !slices.ContainsFunc(orgs, func(o run.Org) bool { return o.ID == firstOrg }) {
		return nil
	}
	org, err := c.store.CreateOrg(ctx, run.Org{ID: firstOrg, Name: "default"})
	if err != nil {
		return fmt.Errorf("create the first organisation: %w", err)
	}
	if _, err := c.store.Credit(ctx, org.ID, firstCredit, "initial-credit"); err != nil {
		return fmt.Errorf("credit the first organisation: %w", err)
	}
	keys, err := c.store.Keys(ctx, org.ID)
	if err != nil {
		return fmt.Errorf("look for keys: %w", err)
	}
	if len(keys) > 0 {
		fmt.Fprintln(w, "The keys of this server were shown at its first start; make further ones with \"ephemeral keys create\".")
		return nil
	}
	_, admin, err := c.store.CreateKey(ctx, "", "first admin key", run.Admin)
	if err != nil {
		return fmt.Errorf("create the admin key: %w", err)
	}
	_, member, err := c.store.CreateKey(ctx, org.ID, "first member key", run.Member)
	if err != nil {
		return fmt.Errorf("create the member key: %w", err)
	}
	fmt.Fprintf(w, `Created organisation %s with %s of credit. These keys are shown once:

  export EPHEMERAL_URL=http://%s
  export EPHEMERAL_API_KEY=%s      # member: runs
  # admin key: %s

`, org.ID, firstCredit, c.Gateway.Listen, member, admin)
	return nil
}
