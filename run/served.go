package run

import (
	"context"
	"slices"
)

// ServedImages returns the names of the images that a run of this cell can use, sorted: those that all living nodes serve, since
// any of them may take the run. While no node lives, those of the nodes that are known count. known is false when there is
// none at all.
func (s *Store) ServedImages(ctx context.Context) (names []string, known bool, err error) {
	nodes, err := s.Nodes(ctx)
	if err != nil {
		return nil, false, err
	}
	if living := slices.DeleteFunc(slices.Clone(nodes), func(n Node) bool { return !n.Alive }); len(living) > 0 {
		nodes = living
	}
	for i, n := range nodes {
		serves := n.Images
		if len(serves) == 0 {
			serves = []string{DefaultImage}
		}
		if i == 0 {
			names = slices.Compact(slices.Sorted(slices.Values(serves)))
			continue
		}
		names = slices.DeleteFunc(names, func(name string) bool { return !slices.Contains(serves, name) })
	}
	return names, len(nodes) > 0, nil
}
