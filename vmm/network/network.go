package network

import (
	"context"
	"errors"
	"fmt"
	"os"
	"regexp"
	"slices"
	"sync"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
)

// ErrInUse says that another live process on this host holds the namespace of that node.
var ErrInUse = errors.New("network namespace in use")

// ErrExists says that the machine has a tap already.
var ErrExists = errors.New("tap exists")

// Prefix is what the names of namespaces start with; the node's name follows.
const Prefix = "eph-"

var nodeName = regexp.MustCompile(`^[a-z0-9][a-z0-9-]{0,39}$`)

// Network is the network namespace of one node, held open by a thread that lives in it. Its methods are safe for
// concurrent use.
type Network struct {
	name    string
	thread  *thread        // makes taps and starts VMMs
	sweeper *thread        // removes taps: the kernel takes tens of milliseconds for it, which no launch is to wait for
	handle  netns.NsHandle // keeps the namespace, and the lock that says that it is in use

	filtered error // why the taps have no drop rule at ingress; nil: they have

	watches sync.WaitGroup // sockets being closed

	mu     sync.Mutex
	taps   map[string]*Tap // by machine id
	stale  Stale           // removed, not yet reported
	closed bool
	close  func() error
}

// Stale counts what an earlier life of a node had left.
type Stale struct {
	Namespaces int
	Taps       int
}

// Open makes the namespace of a node, bound to /run/netns/eph-<node> as `ip netns` does it, or adopts the one that an
// earlier life of that node left, and empties it. A node's name is 1 to 40 lower-case letters, digits and dashes.
// ErrInUse: a live process has it. It needs CAP_SYS_ADMIN and CAP_NET_ADMIN.
func Open(ctx context.Context, node string) (*Network, error) {
	if !nodeName.MatchString(node) {
		return nil, fmt.Errorf("network of node %q: name must match %s", node, nodeName)
	}
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("network of node %s: %w", node, err)
	}
	n := &Network{name: Prefix + node, thread: startThread(), sweeper: startThread(), taps: map[string]*Tap{}, handle: netns.None()}
	n.close = sync.OnceValue(n.shut)
	err := n.thread.do(func() error { return n.enter(ctx) })
	if err == nil {
		err = n.sweeper.do(func() error { return netns.Set(n.handle) })
	}
	if err != nil {
		n.thread.stop()
		n.sweeper.stop()
		if n.handle.IsOpen() {
			if !errors.Is(err, ErrInUse) {
				err = errors.Join(err, unname(n.name))
			}
			err = errors.Join(err, n.handle.Close())
		}
		return nil, fmt.Errorf("network namespace %s: %w", n.name, err)
	}
	return n, nil
}

// Name is the namespace's name, as `ip netns` lists it.
func (n *Network) Name() string { return n.name }

// Filtered says whether every tap has the drop-and-count rule at its ingress: nil if so, else why the kernel refused it.
// Without the rule the guarantee still holds (nothing leads out of the namespace), but one line of defence is missing:
// report it.
func (n *Network) Filtered() error { return n.filtered }

// Do calls f on the thread that lives in the namespace, one call at a time, and returns its error. Processes that f starts
// are in the namespace, and a parent-death signal that they asked for comes when the network is closed or this process
// ends. f must not call methods of the network or of its taps, nor end its goroutine. After Close: ErrClosed.
func (n *Network) Do(f func() error) error { return n.thread.do(f) }

// Taps lists the names of the taps in use, sorted.
func (n *Network) Taps() []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	names := make([]string, 0, len(n.taps))
	for _, t := range n.taps {
		names = append(names, t.Name)
	}
	slices.Sort(names)
	return names
}

// RemoveStale removes every interface of the namespace that belongs to no open tap, and counts what it removed together
// with what Open found and removed. A second call counts only what is new.
func (n *Network) RemoveStale(ctx context.Context) (Stale, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if err := ctx.Err(); err != nil {
		return Stale{}, fmt.Errorf("remove stale taps of %s: %w", n.name, err)
	}
	if n.closed {
		return Stale{}, ErrClosed
	}
	err := n.thread.do(func() error {
		removed, err := removeLinks(func(name string) bool {
			return slices.ContainsFunc(mapValues(n.taps), func(t *Tap) bool { return t.Name == name })
		})
		n.stale.Taps += removed
		return err
	})
	if err != nil {
		return Stale{}, fmt.Errorf("remove stale taps of %s: %w", n.name, err)
	}
	stale := n.stale
	n.stale = Stale{}
	return stale, nil
}

// Close closes every tap, ends the thread (processes started by Do that asked for a parent-death signal die), and removes
// the namespace. It is idempotent.
func (n *Network) Close() error { return n.close() }

func (n *Network) shut() error {
	n.mu.Lock()
	n.closed = true
	taps := mapValues(n.taps)
	n.mu.Unlock()
	var errs []error
	for _, t := range taps {
		errs = append(errs, t.Close())
	}
	n.thread.stop()
	n.sweeper.stop()
	n.watches.Wait()
	errs = append(errs, unname(n.name), n.handle.Close())
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("close network namespace %s: %w", n.name, err)
	}
	return nil
}

// removeLinks deletes all links of the current namespace but the loopback device and those to keep.
func removeLinks(keep func(name string) bool) (removed int, err error) {
	links, err := Whole(netlink.LinkList)
	if err != nil {
		return 0, fmt.Errorf("list links: %w", err)
	}
	for _, l := range links {
		a := l.Attrs()
		if a.Name == "lo" || keep(a.Name) {
			continue
		}
		if err := deleteLink(a.Name); err != nil {
			return removed, err
		}
		removed++
	}
	return removed, nil
}

// deleteLink deletes a link of the current namespace; one that is gone already is no error.
func deleteLink(name string) error {
	link, err := netlink.LinkByName(name)
	if err == nil {
		err = netlink.LinkDel(link)
	}
	if err != nil && !isGone(err) {
		return fmt.Errorf("delete link %s: %w", name, err)
	}
	return nil
}

func isGone(err error) bool {
	var missing netlink.LinkNotFoundError
	return errors.As(err, &missing) || errors.Is(err, os.ErrNotExist) || isNoDevice(err)
}

func mapValues(m map[string]*Tap) []*Tap {
	values := make([]*Tap, 0, len(m))
	for _, t := range m {
		values = append(values, t)
	}
	return values
}
