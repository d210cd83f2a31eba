package network

import (
	"errors"
	"fmt"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// tableName is that of both tables in the namespace: family netdev for the taps, family inet for the namespace itself.
const tableName = "ephemeral"

// dropAndCount is the one rule there is.
func dropAndCount() []expr.Any {
	return []expr.Any{&expr.Counter{}, &expr.Verdict{Kind: expr.VerdictDrop}}
}

// resetRules replaces all rules of the current namespace: everything it would receive, forward or send is dropped. It
// also tries a rule at ingress, on the loopback device, which is down: the error says why there can be none on taps.
func resetRules() error {
	c, err := nftables.New()
	if err != nil {
		return fmt.Errorf("nftables: %w", err)
	}
	c.FlushRuleset()
	inet := c.AddTable(&nftables.Table{Name: tableName, Family: nftables.TableFamilyINet})
	drop := nftables.ChainPolicyDrop
	for _, hook := range []struct {
		name string
		num  *nftables.ChainHook
	}{
		{"input", nftables.ChainHookInput},
		{"forward", nftables.ChainHookForward},
		{"output", nftables.ChainHookOutput},
	} {
		chain := c.AddChain(&nftables.Chain{
			Name: hook.name, Table: inet, Type: nftables.ChainTypeFilter,
			Hooknum: hook.num, Priority: nftables.ChainPriorityFilter, Policy: &drop,
		})
		c.AddRule(&nftables.Rule{Table: inet, Chain: chain, Exprs: dropAndCount()})
	}
	if err := c.Flush(); err != nil {
		return fmt.Errorf("nftables rules of the namespace: %w", err)
	}
	if err := addIngress("lo"); err != nil {
		return err
	}
	return removeIngress("lo")
}

func netdevTable() *nftables.Table {
	return &nftables.Table{Name: tableName, Family: nftables.TableFamilyNetdev}
}

// addIngress drops and counts all that arrives on a device of the current namespace, before any protocol sees it.
func addIngress(device string) error {
	c, err := nftables.New()
	if err != nil {
		return fmt.Errorf("nftables: %w", err)
	}
	drop := nftables.ChainPolicyDrop
	table := c.AddTable(netdevTable())
	chain := c.AddChain(&nftables.Chain{
		Name: device, Table: table, Type: nftables.ChainTypeFilter, Device: device,
		Hooknum: nftables.ChainHookIngress, Priority: nftables.ChainPriorityFilter, Policy: &drop,
	})
	c.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: dropAndCount()})
	if err := c.Flush(); err != nil {
		return fmt.Errorf("nftables drop rule at ingress of %s: %w", device, err)
	}
	return nil
}

// removeIngress removes the rule of a device. Kernels before 6.16 remove it with the device: gone is no error.
func removeIngress(device string) error {
	c, err := nftables.New()
	if err != nil {
		return fmt.Errorf("nftables: %w", err)
	}
	chain := &nftables.Chain{Name: device, Table: netdevTable()}
	c.FlushChain(chain)
	c.DelChain(chain)
	if err := c.Flush(); err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("remove nftables rule of %s: %w", device, err)
	}
	return nil
}
