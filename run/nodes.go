package run

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
)

// Node is what a host that carries out runs says of itself.
type Node struct {
	ID         string    `json:"id"`
	Version    string    `json:"version"`         // of the program
	Hypervisor string    `json:"hypervisor"`      // name and version
	Isolation  string    `json:"isolation"`       // "kvm" or "emulated"
	Image      string    `json:"image"`           // digest, of the first of Images
	Images     []string  `json:"images,omitzero"` // names of those that it serves; none: the default image alone
	Able       []string  `json:"able,omitzero"`   // those of them that it has machines of now
	Slots      int       `json:"slots"`           // runs at once
	Running    int       `json:"running"`         // runs now
	Ready      int       `json:"ready"`           // machines that wait for a run
	Draining   bool      `json:"draining"`        // takes no more runs
	StartedAt  time.Time `json:"started_at"`
	SeenAt     time.Time `json:"seen_at"` // when it said so
	Alive      bool      `json:"alive"`   // it spoke lately
}

// How nodes speak.
const (
	NodeInterval = 5 * time.Second  // between two announcements
	nodeSilence  = 4 * NodeInterval // after which a node counts as gone
	nodeKept     = 24 * time.Hour   // after which it is forgotten
)

// Announce stores what a node says of itself; SeenAt and Alive are filled in. The slots of a node that is not draining count
// for the estimate of waits until it has been silent for too long.
func (s *Store) Announce(ctx context.Context, n Node) error {
	if !nodePattern.MatchString(n.ID) || n.Slots < 0 || n.Slots > maxConcurrency {
		return fmt.Errorf("announce node %.64q, %d runs at once: %w", n.ID, n.Slots, ErrRange)
	}
	now := s.micros()
	n.SeenAt, n.Alive = time.UnixMicro(now).UTC(), false
	raw, err := encode("node", n)
	if err != nil {
		return fmt.Errorf("announce node: %w", err)
	}
	err = s.pipelined(ctx, func(p redis.Pipeliner) {
		p.HSet(ctx, s.keys.nodes(), n.ID, raw)
		if n.Draining || n.Slots == 0 {
			p.HDel(ctx, s.keys.slots(), n.ID)
		} else {
			p.HSet(ctx, s.keys.slots(), n.ID, fmt.Sprintf("%d %d", n.Slots, now+nodeSilence.Microseconds()))
		}
	})
	if err != nil {
		return fmt.Errorf("announce node %s: %w", n.ID, err)
	}
	return nil
}

// Retire forgets a node that has stopped.
func (s *Store) Retire(ctx context.Context, id string) error {
	err := s.pipelined(ctx, func(p redis.Pipeliner) {
		p.HDel(ctx, s.keys.nodes(), id)
		p.HDel(ctx, s.keys.slots(), id)
	})
	if err != nil {
		return fmt.Errorf("retire node %s: %w", id, err)
	}
	return nil
}

// Nodes returns the nodes of the cell by id; those that were silent for a day are forgotten.
func (s *Store) Nodes(ctx context.Context) ([]Node, error) {
	raw, err := s.rdb.HGetAll(ctx, s.keys.nodes()).Result()
	if err != nil {
		return nil, fmt.Errorf("list nodes: %w", unavailable(err))
	}
	now := s.now()
	nodes, gone := []Node{}, []string{}
	for id, v := range raw {
		var n Node
		if err := json.Unmarshal([]byte(v), &n); err != nil {
			return nil, fmt.Errorf("list nodes: stored node %.64q: %w", id, err)
		}
		if now.Sub(n.SeenAt) > nodeKept {
			gone = append(gone, id)
			continue
		}
		n.Alive = now.Sub(n.SeenAt) < nodeSilence
		nodes = append(nodes, n)
	}
	if len(gone) > 0 {
		err := s.pipelined(ctx, func(p redis.Pipeliner) { p.HDel(ctx, s.keys.nodes(), gone...); p.HDel(ctx, s.keys.slots(), gone...) })
		if err != nil {
			return nil, fmt.Errorf("forget nodes: %w", err)
		}
	}
	slices.SortFunc(nodes, func(a, b Node) int { return strings.Compare(a.ID, b.ID) })
	return nodes, nil
}
