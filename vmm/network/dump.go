package network

import (
	"errors"

	"github.com/vishvananda/netlink"
)

// dumps is how often a listing is tried: what interrupts it is one change, which is over at once.
const dumps = 50

// Whole calls list until nothing interrupted it: the kernel marks a listing during which what it lists has changed
// (NLM_F_DUMP_INTR, linux/netlink.h), since it may lack entries. After 50 attempts it gives up with netlink.ErrDumpInterrupted.
func Whole[T any](list func() ([]T, error)) (all []T, err error) {
	for range dumps {
		if all, err = list(); !errors.Is(err, netlink.ErrDumpInterrupted) {
			return all, err
		}
	}
	return nil, err
}
