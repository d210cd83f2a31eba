package network

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// directory is where iproute2 keeps named network namespaces.
const directory = "/run/netns"

const lockLimit = 500 * time.Millisecond

// settings of the namespace, under /proc/sys/net. The kernel takes the namespace of the thread that opens them.
// A new interface starts with those of "default".
var settings = []struct{ key, value string }{
	{"ipv4/ip_forward", "0"},
	{"ipv4/conf/all/forwarding", "0"},
	{"ipv4/conf/default/forwarding", "0"},
	{"ipv4/conf/default/arp_ignore", "8"}, // answer no ARP request at all
	{"ipv6/conf/all/forwarding", "0"},
	{"ipv6/conf/all/disable_ipv6", "1"},
	{"ipv6/conf/default/disable_ipv6", "1"},
	{"ipv6/conf/default/accept_ra", "0"},
	{"ipv6/conf/default/router_solicitations", "0"},
	{"ipv6/conf/default/autoconf", "0"},
}

// enter makes or adopts the namespace and moves the current thread into it. n.handle is set as soon as there is one.
func (n *Network) enter(ctx context.Context) error {
	exists, err := named(n.name)
	if err != nil {
		return err
	}
	if exists {
		err = n.adopt()
	} else {
		err = n.create()
	}
	if err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	return n.harden()
}

func (n *Network) create() error {
	if err := shareDirectory(); err != nil {
		return err
	}
	handle, err := netns.NewNamed(n.name)
	if err != nil {
		return fmt.Errorf("create: %w", err)
	}
	n.handle = handle
	return n.lock()
}

func (n *Network) adopt() error {
	handle, err := netns.GetFromName(n.name)
	if err != nil {
		return fmt.Errorf("open: %w", err)
	}
	n.handle = handle
	if err := n.lock(); err != nil {
		return err
	}
	if err := netns.Set(handle); err != nil {
		return fmt.Errorf("enter: %w", err)
	}
	n.stale.Namespaces++
	n.stale.Taps, err = removeLinks(func(string) bool { return false })
	return err
}

// lock marks the namespace as used by this process. The lock goes with the last descriptor of the handle, so also when
// the process is killed. What that had been forking may hold it for a moment longer, so lock does not give up at once.
func (n *Network) lock() error {
	for deadline := time.Now().Add(lockLimit); ; time.Sleep(5 * time.Millisecond) {
		err := unix.Flock(int(n.handle), unix.LOCK_EX|unix.LOCK_NB)
		switch {
		case err == nil:
			return nil
		case !errors.Is(err, unix.EWOULDBLOCK):
			return fmt.Errorf("lock: %w", err)
		case time.Now().After(deadline):
			return ErrInUse
		}
	}
}

// harden brings the namespace into its one state: loopback down and without addresses, no forwarding, no IPv6, and the
// rules.
func (n *Network) harden() error {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("find loopback: %w", err)
	}
	if err := netlink.LinkSetDown(lo); err != nil {
		return fmt.Errorf("take loopback down: %w", err)
	}
	addresses, err := Whole(func() ([]netlink.Addr, error) { return netlink.AddrList(lo, netlink.FAMILY_ALL) })
	if err != nil {
		return fmt.Errorf("list addresses: %w", err)
	}
	for _, a := range addresses {
		if err := netlink.AddrDel(lo, &a); err != nil {
			return fmt.Errorf("remove address %s: %w", a.IPNet, err)
		}
	}
	for _, s := range settings {
		if err := setting(s.key, s.value); err != nil {
			return err
		}
	}
	n.filtered = resetRules()
	return nil
}

// setting writes a file of /proc/sys/net. A kernel without IPv6 has no such files and nothing to turn off.
func setting(key, value string) error {
	err := os.WriteFile(filepath.Join("/proc/sys/net", key), []byte(value), 0)
	if errors.Is(err, fs.ErrNotExist) && len(key) > 4 && key[:4] == "ipv6" {
		if _, missing := os.Stat("/proc/sys/net/ipv6"); errors.Is(missing, fs.ErrNotExist) {
			return nil
		}
	}
	if err != nil {
		return fmt.Errorf("set net/%s to %s: %w", key, value, err)
	}
	return nil
}

// named says whether a namespace of that name exists. A file that is no namespace is what a crash between making the
// file and mounting on it leaves: it is removed.
func named(name string) (bool, error) {
	path := filepath.Join(directory, name)
	var st unix.Statfs_t
	err := unix.Statfs(path, &st)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return false, nil
	case err != nil:
		return false, fmt.Errorf("look at %s: %w", path, err)
	case st.Type == unix.NSFS_MAGIC:
		return true, nil
	}
	if err := os.Remove(path); err != nil {
		return false, fmt.Errorf("remove what is no namespace: %w", err)
	}
	return false, nil
}

// unname removes the name. The namespace itself ends with the last process and descriptor in it.
func unname(name string) error {
	path := filepath.Join(directory, name)
	if err := unix.Unmount(path, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("unmount %s: %w", path, err)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// shareDirectory makes /run/netns a shared mount of its own, as iproute2 does, so that unmounting a name here removes it
// in other mount namespaces too, and so that a later `ip netns add` does not mount over it.
func shareDirectory() error {
	if err := os.MkdirAll(directory, 0o755); err != nil {
		return err
	}
	err := unix.Mount("", directory, "none", unix.MS_SHARED|unix.MS_REC, "")
	if errors.Is(err, unix.EINVAL) { // not a mount point yet
		if err := unix.Mount(directory, directory, "none", unix.MS_BIND|unix.MS_REC, ""); err != nil {
			return fmt.Errorf("mount %s: %w", directory, err)
		}
		err = unix.Mount("", directory, "none", unix.MS_SHARED|unix.MS_REC, "")
	}
	if err != nil {
		return fmt.Errorf("share %s: %w", directory, err)
	}
	return nil
}

func isNoDevice(err error) bool { return errors.Is(err, unix.ENODEV) || errors.Is(err, unix.ENXIO) }
