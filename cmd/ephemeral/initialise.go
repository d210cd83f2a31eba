package main

import (
	"context"
	"fmt"
	"io"

	"github.com/ephemeral-run/ephemeral/run"
)

// firstCredit is what the first organisation starts with: ten dollars of the operator's own money.
const firstCredit run.Micros = 10_000_000

// initialise makes an empty cell usable: an organisation with credit, a member key and an admin key, printed once. A cell
// that has an organisation is left as it is.
func initialise(ctx context.Context, c *cell, w io.Writer) error {
	orgs, err := c.store.Orgs(ctx)
	if err != nil {
		return fmt.Errorf("look for organisations: %w", err)
	}
	if len(orgs) > 0 {
		fmt.Fprintf(w, "This cell has %d organisation(s); make further keys with \"ephemeral keys create\".\n", len(orgs))
		return nil
	}
	org, err := c.store.CreateOrg(ctx, run.Org{Name: "default"})
	if err != nil {
		return fmt.Errorf("create the first organisation: %w", err)
	}
	if _, err := c.store.Credit(ctx, org.ID, firstCredit, "initial credit"); err != nil {
		return fmt.Errorf("credit the first organisation: %w", err)
	}
	_, member, err := c.store.CreateKey(ctx, org.ID, "first member key", run.Member)
	if err != nil {
		return fmt.Errorf("create the member key: %w", err)
	}
	_, admin, err := c.store.CreateKey(ctx, "", "first admin key", run.Admin)
	if err != nil {
		return fmt.Errorf("create the admin key: %w", err)
	}
	fmt.Fprintf(w, `Created organisation %s with %s of credit. These keys are shown once:

  export EPHEMERAL_URL=http://%s
  export EPHEMERAL_API_KEY=%s      # member: runs
  # admin key: %s

`, org.ID, firstCredit, c.Gateway.Listen, member, admin)
	return nil
}
