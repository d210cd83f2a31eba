package main

import (
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/ephemeral-run/ephemeral/client"
	"github.com/ephemeral-run/ephemeral/run"
	"github.com/ephemeral-run/ephemeral/run/receipt"
)

func runsReceiptsCommand() *cobra.Command {
	var output outputFormat
	return onRun(&cobra.Command{
		Use:   "receipts RUN",
		Short: "Verify the signed receipt of every outward call of a run",
		Long: `Verifies the signature on every model, web and connection event of a run with the public keys that the server names, and that
no number is missing. Exits with 1 and names what does not hold.`,
	}, &output, func(cmd *cobra.Command, c *client.Client, id run.ID) error {
		id, err := run.ParseID(string(id))
		if err != nil {
			return err
		}
		r, err := c.Run(cmd.Context(), id)
		if err != nil {
			return err
		}
		if !r.State.Terminal() {
			return fmt.Errorf("%s is %s: its receipts can be verified once it has ended", id, r.State)
		}
		keys, err := c.ReceiptKeys(cmd.Context())
		if err != nil {
			return err
		}
		var events []run.Event
		for e, err := range c.Events(cmd.Context(), id, 0) {
			if err != nil {
				return err
			}
			events = append(events, e)
		}
		check := receipt.CheckAll(id, events, receipt.Keys(keys))
		if err := output.print(cmd, check, func(w io.Writer) { printCheck(w, check, r) }); err != nil {
			return err
		}
		if !check.Holds() {
			return exitCode(1)
		}
		return nil
	})
}

func printCheck(w io.Writer, c receipt.Check, r run.Run) {
	fmt.Fprintf(w, "%d receipts hold: %s for models, the web and connections; the record says %s\n", c.Valid, run.Micros(c.Micros), r.Money.Model+r.Money.Web)
	for _, k := range c.Keys {
		fmt.Fprintln(w, "signed with key "+k)
	}
	for _, f := range c.Faults {
		fmt.Fprintf(w, "DOES NOT HOLD: event %d (%s): %s\n", f.Seq, f.Type, f.Reason)
	}
	if len(c.Missing) > 0 {
		fmt.Fprintf(w, "MISSING: receipts number %v\n", c.Missing)
	}
}
