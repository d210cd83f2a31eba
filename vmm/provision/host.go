package provision

import (
	"context"
	"errors"

	"github.com/ephemeral-run/ephemeral/vmm"
	"github.com/ephemeral-run/ephemeral/vmm/jail"
	"github.com/ephemeral-run/ephemeral/vmm/network"
)

// host is what machines get from the kernel.
type host interface {
	cell(id string, memoryMiB int) (cell, error)
	tap(id string, uid int) (tap, error)
	// removeStale removes what an earlier life left of both kinds.
	removeStale(context.Context) (Residue, error)
	close() error
}

// cell is a machine's jail; see jail.Cell.
type cell interface {
	vmm.Launcher
	UID() int
	SetUrgent(bool) error
	Close() error
}

// tap is the host's end of a machine's network card; see network.Tap.
type tap interface {
	nic() *vmm.NIC
	Counters() (packets, bytes int64, err error)
	Attempts() network.Attempts
	Close() error
}

// linux is the real host.
type linux struct {
	network *network.Network
	jail    *jail.Jail
}

func openLinux(ctx context.Context, c jail.Config) (*linux, error) {
	n, err := network.Open(ctx, c.Node)
	if err != nil {
		return nil, err
	}
	j, err := jail.Open(c)
	if err != nil {
		return nil, errors.Join(err, n.Close())
	}
	return &linux{network: n, jail: j}, nil
}

func (l *linux) cell(id string, memoryMiB int) (cell, error) {
	c, err := l.jail.New(id, jail.Options{MemoryMiB: memoryMiB, Netns: l.network})
	if err != nil { // not a nil *Cell in an interface
		return nil, err
	}
	return c, nil
}

func (l *linux) tap(id string, uid int) (tap, error) {
	t, err := l.network.NewTap(id, uid)
	if err != nil {
		return nil, err
	}
	return card{t}, nil
}

type card struct{ *network.Tap }

func (c card) nic() *vmm.NIC { return &vmm.NIC{Tap: c.Name, MAC: c.MAC, File: c.File} }

func (l *linux) removeStale(ctx context.Context) (Residue, error) {
	cells, errCells := l.jail.RemoveStale(ctx)
	taps, errTaps := l.network.RemoveStale(ctx)
	return Residue{
		Processes: cells.Processes, Cgroups: cells.Cgroups, Taps: taps.Taps, Namespaces: taps.Namespaces,
	}, errors.Join(errCells, errTaps)
}

func (l *linux) close() error { return errors.Join(l.jail.Close(), l.network.Close()) }
