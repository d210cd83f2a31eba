package prepare

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"time"
	"unsafe"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Kernel is the machine.
type Kernel struct {
	names map[string]*os.File
	route *netlink.Handle
	card  netlink.Link  // nil: there is none
	addr  *netlink.Addr // that SetNetwork gave the card; nil: none
}

// The files that name a machine. The boot id lies over the kernel's, which all clones of a template share.
const (
	hostnameFile  = "/etc/hostname"
	machineIDFile = "/etc/machine-id"
	hostsFile     = "/etc/hosts"
	bootIDFile    = "/run/boot_id"
	bootIDOfProc  = "/proc/sys/kernel/random/boot_id"
)

// NewKernel readies the machine, before a template is made of it, so that SetNames has only to write: making a file in
// the image's layer costs an emulated machine tens of milliseconds. card is the name of the network card.
func NewKernel(card string) (*Kernel, error) {
	k := &Kernel{names: make(map[string]*os.File)}
	if err := k.openNetwork(card); err != nil {
		return nil, err
	}
	for _, path := range []string{hostnameFile, machineIDFile, hostsFile, bootIDFile} {
		file, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o644)
		if err != nil {
			return nil, fmt.Errorf("prepare names: %w", err)
		}
		k.names[path] = file
	}
	if err := k.write(hostsFile, "127.0.0.1\tlocalhost\n"); err != nil {
		return nil, err
	}
	if err := k.setBootID(); err != nil {
		return nil, err
	}
	if err := unix.Mount(bootIDFile, bootIDOfProc, "", unix.MS_BIND, ""); err != nil {
		return nil, fmt.Errorf("prepare boot id: %w", err)
	}
	return k, nil
}

func (k *Kernel) openNetwork(card string) (err error) {
	if k.route, err = netlink.NewHandle(unix.NETLINK_ROUTE); err != nil {
		return fmt.Errorf("open network: %w", err)
	}
	k.card, err = k.route.LinkByName(card)
	if errors.As(err, new(netlink.LinkNotFoundError)) {
		k.card = nil
		return nil
	}
	if err != nil {
		return fmt.Errorf("find network card: %w", err)
	}
	return nil
}

func (k *Kernel) write(path, content string) error {
	file := k.names[path]
	if err := file.Truncate(0); err != nil {
		return fmt.Errorf("set names: %w", err)
	}
	if _, err := file.WriteAt([]byte(content), 0); err != nil {
		return fmt.Errorf("set names: %w", err)
	}
	return nil
}

// SetClock sets the wall clock at once, without slewing.
func (*Kernel) SetClock(to time.Time) error {
	ts := unix.NsecToTimespec(to.UnixNano())
	return unix.ClockSettime(unix.CLOCK_REALTIME, &ts)
}

// StepClock moves the wall clock.
func (k *Kernel) StepClock(by time.Duration) error {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_REALTIME, &now); err != nil {
		return err
	}
	return k.SetClock(time.Unix(0, now.Nano()).Add(by))
}

// Requests of random(4), include/uapi/linux/random.h.
const (
	rndAddEntropy = 0x40085203
	rndReseedCRNG = 0x5207
)

// Reseed mixes the bytes into the kernel's generator and makes it draw a new key from its pool. The bytes alone do not
// do: the kernel would go on with the key that all clones share until its next reseed, minutes later.
func (*Kernel) Reseed(entropy []byte) error {
	device, err := os.OpenFile("/dev/urandom", os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer device.Close()
	// struct rand_pool_info { int entropy_count; int buf_size; __u32 buf[]; }
	info := make([]byte, 8, 8+len(entropy))
	binary.NativeEndian.PutUint32(info[0:], uint32(8*len(entropy)))
	binary.NativeEndian.PutUint32(info[4:], uint32(len(entropy)))
	info = append(info, entropy...)
	defer clear(info)
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, device.Fd(), rndAddEntropy, uintptr(unsafe.Pointer(&info[0]))); errno != 0 {
		return fmt.Errorf("RNDADDENTROPY: %w", errno)
	}
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, device.Fd(), rndReseedCRNG, 0); errno != 0 {
		return fmt.Errorf("RNDRESEEDCRNG: %w", errno)
	}
	return nil
}

// SetNames sets what tells one machine from another by name.
func (k *Kernel) SetNames(hostname, machineID string) error {
	if err := unix.Sethostname([]byte(hostname)); err != nil {
		return fmt.Errorf("set hostname: %w", err)
	}
	return errors.Join(
		k.write(hostnameFile, hostname+"\n"),
		k.write(machineIDFile, machineID+"\n"),
		k.write(hostsFile, hosts(hostname)),
		k.setBootID(),
	)
}

func hosts(hostname string) string {
	return "127.0.0.1\tlocalhost\n127.0.1.1\t" + hostname + "\n"
}

// AddHost adds a line to the hosts file. It is called after SetNames.
func (k *Kernel) AddHost(address, name string) error {
	hostname, err := os.Hostname()
	if err != nil {
		return fmt.Errorf("add host: %w", err)
	}
	return k.write(hostsFile, hosts(hostname)+address+"\t"+name+"\n")
}

func (k *Kernel) setBootID() error {
	var id [16]byte
	if _, err := rand.Read(id[:]); err != nil {
		return fmt.Errorf("set boot id: %w", err)
	}
	id[6], id[8] = id[6]&0x0f|0x40, id[8]&0x3f|0x80 // a version 4 UUID, RFC 9562
	return k.write(bootIDFile, fmt.Sprintf("%x-%x-%x-%x-%x\n", id[:4], id[4:6], id[6:8], id[8:10], id[10:]))
}

// SetNetwork gives the card its address, in place of an earlier one, and a default route through it. The card does no ARP, so packets to anywhere
// leave at once, for the host to count and drop.
func (k *Kernel) SetNetwork(mac, address string) error {
	if mac == "" && address == "" {
		return nil
	}
	if k.card == nil {
		return errors.New("set up network: the machine has no card")
	}
	if mac != "" {
		hw, err := net.ParseMAC(mac)
		if err == nil {
			err = k.route.LinkSetHardwareAddr(k.card, hw)
		}
		if err != nil {
			return fmt.Errorf("set MAC address: %w", err)
		}
	}
	if address == "" {
		return nil
	}
	addr, err := netlink.ParseAddr(address)
	if err == nil && k.addr != nil {
		err = k.route.AddrDel(k.card, k.addr)
	}
	if err == nil {
		k.addr, err = addr, k.route.AddrReplace(k.card, addr)
	}
	if err != nil {
		return fmt.Errorf("set address: %w", err)
	}
	all := &net.IPNet{IP: net.IPv4zero, Mask: net.CIDRMask(0, 32)}
	route := &netlink.Route{LinkIndex: k.card.Attrs().Index, Dst: all, Scope: netlink.SCOPE_LINK}
	if err := k.route.RouteReplace(route); err != nil {
		return fmt.Errorf("set default route: %w", err)
	}
	return nil
}
