package network

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/net/dns/dnsmessage"
	"golang.org/x/sys/unix"
)

// Attempt is whom a guest tried to reach. It says what the guest's packets said.
type Attempt struct {
	Protocol string     // tcp, udp, icmp, icmpv6, igmp, arp, ip-<number> or ethernet-<hexadecimal type>
	Address  netip.Addr // of the destination; the zero address where the protocol has none
	Port     uint16     // of the destination; 0 where the protocol has none
	Name     string     // asked for, where the packet is a question to a name server
	Packets  int
}

// Attempts are those of one guest, the most frequent first.
type Attempts struct {
	List []Attempt
	More bool // the guest sent more than was looked at, or to more than are listed
}

const (
	// maxAttempts bounds the different attempts of a guest that are told.
	maxAttempts = 32
	// maxWatched bounds the packets looked at; the kernel keeps fewer of large ones.
	maxWatched = 1024
	// watchBuffer is what the kernel keeps of a guest's first packets, in bytes of its own memory. It doubles the number.
	watchBuffer = 128 << 10
	// snapLength is how much of a packet is looked at.
	snapLength = 512
)

// watch keeps the first packets of a tap in the kernel's memory, bounded there, until they are read at the end: a flood
// costs nothing more, and nobody has to be awake for it.
type watch struct{ fd int }

// newWatch runs on the thread in the namespace.
func newWatch(device int) (*watch, error) {
	// Without a protocol nothing is received before the socket is bound to its device.
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("packet socket: %w", err)
	}
	const returnK = unix.BPF_RET | unix.BPF_K
	keep := unix.SockFilter{Code: returnK, K: snapLength}
	err = errors.Join(
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, watchBuffer),
		unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: 1, Filter: &keep}),
		unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: binary.NativeEndian.Uint16([]byte{0, unix.ETH_P_ALL}), Ifindex: device}),
	)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("packet socket: %w", err), unix.Close(fd))
	}
	return &watch{fd}, nil
}

// read takes what is there, once.
func (w *watch) read() Attempts {
	counts := map[Attempt]int{}
	buffer := make([]byte, snapLength)
	more := false
	for seen := 0; ; seen++ {
		n, from, err := unix.Recvfrom(w.fd, buffer, 0)
		if errors.Is(err, unix.EINTR) || errors.Is(err, unix.ENETDOWN) { // the device was down once: said once, packet(7)
			continue
		}
		if err != nil {
			break
		}
		if ll, ok := from.(*unix.SockaddrLinklayer); ok && ll.Pkttype == unix.PACKET_OUTGOING {
			continue
		}
		a := parseFrame(buffer[:n])
		if seen == maxWatched || counts[a] == 0 && len(counts) == maxAttempts {
			more = true
			break
		}
		counts[a]++
	}
	if s, err := unix.GetsockoptTpacketStats(w.fd, unix.SOL_PACKET, unix.PACKET_STATISTICS); err == nil && s.Drops > 0 {
		more = true
	}
	list := make([]Attempt, 0, len(counts))
	for a, n := range counts {
		a.Packets = n
		list = append(list, a)
	}
	slices.SortFunc(list, func(a, b Attempt) int {
		return cmp.Or(cmp.Compare(b.Packets, a.Packets), strings.Compare(a.Protocol, b.Protocol), a.Address.Compare(b.Address),
			cmp.Compare(a.Port, b.Port), strings.Compare(a.Name, b.Name))
	})
	return Attempts{List: list, More: more}
}

// close ends the socket. The kernel takes tens of milliseconds for it, which no end of a machine is to wait for.
func (w *watch) close() { _ = unix.Close(w.fd) }

// parseFrame says what an Ethernet frame, or its beginning, is for. The guest made it: any of it may be wrong or missing.
func parseFrame(frame []byte) Attempt {
	if len(frame) < 14 {
		return Attempt{Protocol: "ethernet-none"}
	}
	kind, p := binary.BigEndian.Uint16(frame[12:]), frame[14:]
	switch {
	case kind == unix.ETH_P_IP && len(p) >= 20 && p[0]>>4 == 4:
		to, header := netip.AddrFrom4([4]byte(p[16:20])), int(p[0]&15)*4
		if binary.BigEndian.Uint16(p[6:])&0x1fff != 0 || header > len(p) {
			return parseTransport(p[9], to, nil) // not the first fragment
		}
		return parseTransport(p[9], to, p[header:])
	case kind == unix.ETH_P_IPV6 && len(p) >= 40 && p[0]>>4 == 6:
		return parseTransport(p[6], netip.AddrFrom16([16]byte(p[24:40])), p[40:])
	case kind == unix.ETH_P_ARP && len(p) >= 28:
		return Attempt{Protocol: "arp", Address: netip.AddrFrom4([4]byte(p[24:28]))}
	}
	return Attempt{Protocol: fmt.Sprintf("ethernet-%04x", kind)}
}

var protocols = map[byte]string{
	unix.IPPROTO_TCP: "tcp", unix.IPPROTO_UDP: "udp", unix.IPPROTO_ICMP: "icmp", unix.IPPROTO_ICMPV6: "icmpv6", unix.IPPROTO_IGMP: "igmp",
}

func parseTransport(protocol byte, to netip.Addr, p []byte) Attempt {
	a := Attempt{Protocol: protocols[protocol], Address: to}
	if a.Protocol == "" {
		a.Protocol = fmt.Sprintf("ip-%d", protocol)
	}
	if (protocol == unix.IPPROTO_TCP || protocol == unix.IPPROTO_UDP) && len(p) >= 4 {
		a.Port = binary.BigEndian.Uint16(p[2:])
	}
	if protocol == unix.IPPROTO_UDP && a.Port == 53 && len(p) > 8 {
		a.Name = askedName(p[8:])
	}
	return a
}

// askedName is the first name that a DNS message asks for, empty if it asks for none that can be shown.
func askedName(message []byte) string {
	var parser dnsmessage.Parser
	if _, err := parser.Start(message); err != nil {
		return ""
	}
	q, err := parser.Question()
	if err != nil {
		return ""
	}
	return strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= '0' && r <= '9' || r == '-' || r == '_' || r == '.' {
			return r
		}
		return '?'
	}, strings.ToLower(strings.TrimSuffix(q.Name.String(), ".")))
}
