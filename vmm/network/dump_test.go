package network

import (
	"errors"
	"slices"
	"testing"

	"github.com/vishvananda/netlink"
)

func TestWhole(t *testing.T) {
	broken := errors.New("broken")
	for _, tt := range []struct {
		name  string
		fails []error // of the first calls
		want  error
	}{
		{"at once", nil, nil},
		{"interrupted", []error{netlink.ErrDumpInterrupted, netlink.ErrDumpInterrupted}, nil},
		{"broken after an interruption", []error{netlink.ErrDumpInterrupted, broken}, broken},
		{"interrupted always", slices.Repeat([]error{netlink.ErrDumpInterrupted}, dumps), netlink.ErrDumpInterrupted},
	} {
		t.Run(tt.name, func(t *testing.T) {
			calls := 0
			got, err := Whole(func() ([]int, error) {
				calls++
				if calls <= len(tt.fails) {
					return []int{0}, tt.fails[calls-1]
				}
				return []int{1, 2}, nil
			})
			if !errors.Is(err, tt.want) || tt.want == nil && !slices.Equal(got, []int{1, 2}) {
				t.Errorf("%v, %v after %d calls", got, err, calls)
			}
		})
	}
}
