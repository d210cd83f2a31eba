package network

import (
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"os"
	"regexp"
	"sync"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// TapPrefix is what the names of taps start with; the machine's id follows. Together they have 15 characters, the most
// that the kernel takes.
const TapPrefix = "eph"

var machineID = regexp.MustCompile(`^[0-9a-f]{12}$`)

// Tap is the host's end of one machine's network card. It is not persistent: it ends with its last descriptor, so also
// when this process and the VMM are killed.
type Tap struct {
	Name string           // of the device inside the namespace
	MAC  net.HardwareAddr // the address that the guest's card is to have
	File *os.File         // the queue, for a VMM to inherit; Close closes it

	network *Network
	id      string

	mu       sync.Mutex
	ended    bool
	counts   counters // final ones, once ended
	watch    *watch
	attempts Attempts // once ended
	close    func() error
}

type counters struct{ packets, bytes int64 }

// NewTap makes the tap of a machine: named "eph" and the machine's id (12 hexadecimal digits), owned by uid, with one
// queue and virtio-net headers (IFF_VNET_HDR), up, without address, ARP or IPv6, and with the drop-and-count rule.
// ErrExists: the machine has one open. One that an earlier life left is replaced.
func (n *Network) NewTap(id string, uid int) (*Tap, error) {
	if !machineID.MatchString(id) {
		return nil, fmt.Errorf("tap for %q: id must be 12 hexadecimal digits", id)
	}
	if uid <= 0 {
		return nil, fmt.Errorf("tap for %s: owner %d is no unprivileged user", id, uid)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closed {
		return nil, ErrClosed
	}
	if n.taps[id] != nil {
		return nil, fmt.Errorf("tap for %s: %w", id, ErrExists)
	}
	t := &Tap{network: n, id: id, Name: TapPrefix + id, MAC: guestMAC(id)}
	t.close = sync.OnceValue(t.shut)
	if err := n.thread.do(func() error { return t.create(uid, n.filtered == nil) }); err != nil {
		return nil, fmt.Errorf("tap for %s: %w", id, err)
	}
	n.taps[id] = t
	return t, nil
}

// guestMAC is the address of a machine's card: locally administered, unicast, from the machine's random id.
func guestMAC(id string) net.HardwareAddr {
	mac, err := hex.DecodeString(id)
	if err != nil {
		panic("id was checked: " + err.Error())
	}
	mac[0] = mac[0]&^1 | 2
	return mac
}

// create runs on the thread in the namespace. It leaves nothing when it fails.
func (t *Tap) create(uid int, filter bool) (err error) {
	if err := deleteLink(t.Name); err != nil {
		return err
	}
	t.File, err = openTap(t.Name, uid)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, t.destroy(filter))
		}
	}()
	// The defaults of the namespace say all this too; a tap must not depend on them.
	for _, s := range []struct{ key, value string }{
		{"ipv6/conf/" + t.Name + "/disable_ipv6", "1"},
		{"ipv6/conf/" + t.Name + "/router_solicitations", "0"},
		{"ipv6/conf/" + t.Name + "/accept_ra", "0"},
		{"ipv4/conf/" + t.Name + "/arp_ignore", "8"},
		{"ipv4/conf/" + t.Name + "/forwarding", "0"},
	} {
		if err := setting(s.key, s.value); err != nil {
			return err
		}
	}
	if filter {
		if err := addIngress(t.Name); err != nil {
			return err
		}
	}
	link, err := netlink.LinkByName(t.Name)
	if err != nil {
		return fmt.Errorf("find %s: %w", t.Name, err)
	}
	if t.watch, err = newWatch(link.Attrs().Index); err != nil {
		return fmt.Errorf("watch %s: %w", t.Name, err)
	}
	if err := netlink.LinkSetARPOff(link); err != nil {
		return fmt.Errorf("turn ARP off on %s: %w", t.Name, err)
	}
	if err := netlink.LinkSetUp(link); err != nil {
		return fmt.Errorf("bring %s up: %w", t.Name, err)
	}
	return nil
}

// openTap makes a tap device in the current namespace and returns its queue.
func openTap(name string, uid int) (*os.File, error) {
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open /dev/net/tun: %w", err)
	}
	req, err := unix.NewIfreq(name)
	if err == nil {
		req.SetUint16(unix.IFF_TAP | unix.IFF_NO_PI | unix.IFF_VNET_HDR)
		err = unix.IoctlIfreq(fd, unix.TUNSETIFF, req)
	}
	if err == nil {
		err = unix.IoctlSetInt(fd, unix.TUNSETOWNER, uid)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("make tap %s: %w", name, err), unix.Close(fd))
	}
	return os.NewFile(uintptr(fd), "/dev/net/tun"), nil
}

// Counters says how many frames the guest has sent, and their bytes (Ethernet header included): none of them got
// anywhere. After Close it keeps saying the last numbers.
func (t *Tap) Counters() (packets, bytes int64, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.ended {
		return t.counts.packets, t.counts.bytes, nil
	}
	var c counters
	err = t.network.thread.do(func() (err error) {
		c, err = t.read()
		return err
	})
	if err != nil {
		return 0, 0, fmt.Errorf("counters of %s: %w", t.Name, err)
	}
	return c.packets, c.bytes, nil
}

// Attempts says whom the guest tried to reach, from the first packets that it sent. It is known once the tap is closed.
func (t *Tap) Attempts() Attempts {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.attempts
}

// read runs on the thread in the namespace.
func (t *Tap) read() (counters, error) {
	link, err := netlink.LinkByName(t.Name)
	if err != nil {
		return counters{}, err
	}
	s := link.Attrs().Statistics
	if s == nil {
		return counters{}, errors.New("kernel gave no statistics")
	}
	return counters{packets: int64(s.RxPackets), bytes: int64(s.RxBytes)}, nil
}

// Close removes the tap, also from under a VMM that still has it open. It is idempotent.
func (t *Tap) Close() error { return t.close() }

func (t *Tap) shut() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	err := t.network.sweeper.do(func() error {
		// A tap that somebody deleted has no last numbers; that is no reason to leave anything.
		if c, err := t.read(); err == nil {
			t.counts = c
		}
		t.attempts = t.watch.read()
		return t.destroy(t.network.filtered == nil)
	})
	t.ended = true
	t.network.forget(t)
	if err != nil {
		return fmt.Errorf("close tap %s: %w", t.Name, err)
	}
	return nil
}

// destroy runs on the thread in the namespace. The device goes before its rule: at no time is it up without.
func (t *Tap) destroy(filtered bool) error {
	errs := []error{deleteLink(t.Name), t.File.Close()}
	if t.watch != nil {
		t.network.watches.Go(t.watch.close)
	}
	if filtered {
		errs = append(errs, removeIngress(t.Name))
	}
	return errors.Join(errs...)
}

func (n *Network) forget(t *Tap) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.taps[t.id] == t {
		delete(n.taps, t.id)
	}
}
