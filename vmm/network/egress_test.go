package network

import (
	"bytes"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestEgress: whatever a guest sends reaches no listener and no wire of the host and no other machine, nothing comes back,
// and all of it is counted.
func TestEgress(t *testing.T) {
	n := open(t, "t-"+randomHex(t))
	if err := n.Filtered(); err != nil {
		t.Fatal(err)
	}
	checkEgress(t, n, newTap(t, n), newTap(t, n))
}

// checkEgress sends from one tap and listens everywhere else.
func checkEgress(t *testing.T, n *Network, tap, other *Tap) {
	t.Helper()
	mark := make([]byte, 16) // in every frame, so that it is known wherever it turns up
	if _, err := rand.Read(mark); err != nil {
		t.Fatal(err)
	}
	host := sniff(t, mark)
	tcp, udp := listeners(t)
	frames := attempts(t, n, tap, other, mark, tcp, udp)
	const rounds = 3
	var packets, size int64
	for range rounds {
		for name, frame := range frames {
			if _, err := tap.File.Write(append(make([]byte, 10), frame...)); err != nil { // after an empty virtio-net header
				t.Fatalf("send %s: %v", name, err)
			}
			packets++
			size += int64(len(frame))
		}
	}
	time.Sleep(200 * time.Millisecond)
	if seen := host.seen.Load(); seen != 0 {
		t.Errorf("%d frames of the guest were seen on the host", seen)
	}
	for _, tap := range []*Tap{tap, other} {
		if frames := receive(t, tap); len(frames) != 0 {
			t.Errorf("%s got %d frames: %x", tap.Name, len(frames), frames)
		}
	}
	gotPackets, gotBytes, err := tap.Counters()
	if err != nil || gotPackets != packets || gotBytes != size {
		t.Errorf("counted %d packets, %d bytes, %v; sent were %d, %d", gotPackets, gotBytes, err, packets, size)
	}
	if p, b, err := other.Counters(); err != nil || p != 0 || b != 0 {
		t.Errorf("the other machine is said to have sent %d packets, %d bytes, %v", p, b, err)
	}
	if n.Filtered() == nil {
		rules := inside(t, n, "nft", "list", "chain", "netdev", tableName, tap.Name)
		if want := fmt.Sprintf("counter packets %d ", packets); !strings.Contains(rules, want) {
			t.Errorf("not %q in %s", want, rules)
		}
	}
	if err := tap.Close(); err != nil {
		t.Error(err)
	}
	if p, b, err := tap.Counters(); err != nil || p != packets || b != size {
		t.Errorf("after Close: %d packets, %d bytes, %v", p, b, err)
	}
	// The ears are good: what the host sends with the mark, they hear.
	conn, err := net.Dial("udp", udp.String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := conn.Write(mark); err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(5 * time.Second); host.seen.Load() == 0; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the host does not see even its own packet: the test would see nothing")
		}
	}
}

// ears hear every frame on every interface of the host, and what listeners get.
type ears struct{ seen atomic.Int64 }

func sniff(t *testing.T, mark []byte) *ears {
	t.Helper()
	e := &ears{}
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, int(binary.BigEndian.Uint16([]byte{0, unix.ETH_P_ALL})))
	if err == nil {
		protocol := binary.NativeEndian.Uint16([]byte{unix.ETH_P_ALL >> 8, unix.ETH_P_ALL})
		err = unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: protocol})
	}
	if err == nil {
		err = unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Usec: 20_000})
	}
	if err != nil {
		t.Fatal(err)
	}
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		b := make([]byte, 65536)
		for {
			select {
			case <-stop:
				return
			default:
			}
			size, err := unix.Read(fd, b)
			if err == nil && bytes.Contains(b[:size], mark) {
				e.seen.Add(1)
			}
		}
	}()
	t.Cleanup(func() {
		close(stop)
		<-done
		_ = unix.Close(fd)
	})
	return e
}

// listeners listen on all addresses of the host. A connection fails the test; datagrams the ears hear.
func listeners(t *testing.T) (tcp, udp netip.AddrPort) {
	t.Helper()
	l, err := net.Listen("tcp", "0.0.0.0:0")
	if err != nil {
		t.Fatal(err)
	}
	accepted := make(chan struct{})
	go func() {
		defer close(accepted)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			t.Errorf("connection from %v", c.RemoteAddr())
			_ = c.Close()
		}
	}()
	p, err := net.ListenPacket("udp", "0.0.0.0:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_, _ = l.Close(), p.Close()
		<-accepted
	})
	port := func(a net.Addr) netip.AddrPort {
		return netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), netip.MustParseAddrPort(a.String()).Port())
	}
	return port(l.Addr()), port(p.LocalAddr())
}

// receive reads all frames that a guest would get.
func receive(t *testing.T, tap *Tap) [][]byte {
	t.Helper()
	var frames [][]byte
	conn, err := tap.File.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	err = conn.Control(func(fd uintptr) {
		poll := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		for len(frames) < 10 {
			if n, err := unix.Poll(poll, 0); n == 0 || err != nil {
				return
			}
			b := make([]byte, 2048)
			n, err := unix.Read(int(fd), b)
			if err != nil {
				return
			}
			frames = append(frames, b[:n])
		}
	})
	if err != nil && !errors.Is(err, net.ErrClosed) {
		t.Fatal(err)
	}
	return frames
}

// attempts are frames by which a guest might try to reach somebody.
func attempts(t *testing.T, n *Network, tap, other *Tap, mark []byte, tcp, udp netip.AddrPort) map[string][]byte {
	t.Helper()
	broadcast := net.HardwareAddr{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}
	peer := hardwareAddr(t, n, tap)
	frames := map[string][]byte{
		"ARP request": ethernet(broadcast, tap.MAC, unix.ETH_P_ARP, concat([]byte{0, 1, 8, 0, 6, 4, 0, 1}, tap.MAC,
			[]byte{10, 0, 0, 2}, make([]byte, 6), []byte{10, 0, 0, 1}, mark)),
		"LLDP":          ethernet(net.HardwareAddr{1, 0x80, 0xc2, 0, 0, 0x0e}, tap.MAC, 0x88cc, mark),
		"spanning tree": ethernet(net.HardwareAddr{1, 0x80, 0xc2, 0, 0, 0}, tap.MAC, uint16(len(mark)+3), concat([]byte{0x42, 0x42, 3}, mark)),
		"VLAN":          ethernet(broadcast, tap.MAC, 0x8100, concat([]byte{0, 7, 8, 0}, mark)),
		"experiment":    ethernet(broadcast, tap.MAC, 0x88b5, mark),
		"PPPoE":         ethernet(broadcast, tap.MAC, 0x8863, mark),
		"largest":       ethernet(broadcast, tap.MAC, 0x88b5, concat(mark, make([]byte, 1500-len(mark)))),
	}
	for _, target := range []string{
		"127.0.0.1", "169.254.169.254", "192.0.2.1", "8.8.8.8", "224.0.0.251", "255.255.255.255", "10.0.0.1", "0.0.0.0", hostAddress(t),
	} {
		ip := netip.MustParseAddr(target)
		for name, to := range map[string]net.HardwareAddr{"host": peer, "broadcast": broadcast, "other": other.MAC} {
			frames["TCP to "+target+" by "+name] = ethernet(to, tap.MAC, unix.ETH_P_IP, ipv4(ip, unix.IPPROTO_TCP, syn(tcp.Port(), mark)))
			frames["UDP to "+target+" by "+name] = ethernet(to, tap.MAC, unix.ETH_P_IP, ipv4(ip, unix.IPPROTO_UDP, datagram(udp.Port(), mark)))
			frames["DNS to "+target+" by "+name] = ethernet(to, tap.MAC, unix.ETH_P_IP, ipv4(ip, unix.IPPROTO_UDP, datagram(53, mark)))
			frames["ping "+target+" by "+name] = ethernet(to, tap.MAC, unix.ETH_P_IP, ipv4(ip, unix.IPPROTO_ICMP, echo(8, mark)))
		}
		frames["DHCP to "+target] = ethernet(broadcast, tap.MAC, unix.ETH_P_IP, ipv4(ip, unix.IPPROTO_UDP, datagram(67, mark)))
		frames["IGMP to "+target] = ethernet(broadcast, tap.MAC, unix.ETH_P_IP, ipv4(ip, unix.IPPROTO_IGMP, concat([]byte{0x16, 0, 0, 0, 224, 0, 0, 251}, mark)))
	}
	for _, target := range []string{"::1", "ff02::1", "ff02::2", "ff02::fb", "ff02::1:2", "2001:db8::1", "64:ff9b::a9fe:a9fe", "fe80::1"} {
		ip := netip.MustParseAddr(target)
		group := net.HardwareAddr{0x33, 0x33, 0, 0, 0, 1}
		for name, to := range map[string]net.HardwareAddr{"host": peer, "group": group} {
			frames["UDP to "+target+" by "+name] = ethernet(to, tap.MAC, unix.ETH_P_IPV6, ipv6(ip, unix.IPPROTO_UDP, datagram(udp.Port(), mark)))
			frames["DHCPv6 to "+target+" by "+name] = ethernet(to, tap.MAC, unix.ETH_P_IPV6, ipv6(ip, unix.IPPROTO_UDP, datagram(547, mark)))
			frames["TCP to "+target+" by "+name] = ethernet(to, tap.MAC, unix.ETH_P_IPV6, ipv6(ip, unix.IPPROTO_TCP, syn(tcp.Port(), mark)))
			for kind, what := range map[byte]string{128: "ping", 133: "router solicitation", 134: "router advertisement", 135: "neighbour solicitation"} {
				frames[what+" "+target+" by "+name] = ethernet(to, tap.MAC, unix.ETH_P_IPV6, ipv6(ip, unix.IPPROTO_ICMPV6, echo(kind, mark)))
			}
		}
	}
	return frames
}

// hardwareAddr is the address of the host's end.
func hardwareAddr(t *testing.T, n *Network, tap *Tap) net.HardwareAddr {
	t.Helper()
	var mac net.HardwareAddr
	err := n.Do(func() error {
		i, err := net.InterfaceByName(tap.Name)
		if err == nil {
			mac = i.HardwareAddr
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return mac
}

// hostAddress is an address of the host that other hosts see; the loopback's where there is none.
func hostAddress(t *testing.T) string {
	t.Helper()
	addresses, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range addresses {
		if p, err := netip.ParsePrefix(a.String()); err == nil && p.Addr().Is4() && !p.Addr().IsLoopback() {
			return p.Addr().String()
		}
	}
	return "127.0.0.2"
}

func concat(parts ...[]byte) []byte { return bytes.Join(parts, nil) }

func ethernet(to, from net.HardwareAddr, kind uint16, payload []byte) []byte {
	return concat(to, from, binary.BigEndian.AppendUint16(nil, kind), payload)
}

func ipv4(to netip.Addr, protocol byte, payload []byte) []byte {
	h := []byte{0x45, 0, 0, 0, 0, 1, 0x40, 0, 64, protocol, 0, 0, 10, 0, 0, 2}
	binary.BigEndian.PutUint16(h[2:], uint16(20+len(payload)))
	h = append(h, to.AsSlice()...)
	binary.BigEndian.PutUint16(h[10:], checksum(h))
	return append(h, payload...)
}

func ipv6(to netip.Addr, protocol byte, payload []byte) []byte {
	h := []byte{0x60, 0, 0, 0, 0, 0, protocol, 255}
	binary.BigEndian.PutUint16(h[4:], uint16(len(payload)))
	return concat(h, netip.MustParseAddr("fe80::2").AsSlice(), to.AsSlice(), payload)
}

func checksum(b []byte) uint16 {
	var sum uint32
	for i := 0; i+1 < len(b); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	for sum > 0xffff {
		sum = sum&0xffff + sum>>16
	}
	return ^uint16(sum)
}

func syn(port uint16, mark []byte) []byte {
	h := make([]byte, 20)
	binary.BigEndian.PutUint16(h, 40000)
	binary.BigEndian.PutUint16(h[2:], port)
	h[12], h[13], h[14] = 0x50, 2, 0xff
	return append(h, mark...)
}

func datagram(port uint16, mark []byte) []byte {
	h := make([]byte, 8) // without checksum
	binary.BigEndian.PutUint16(h, 40000)
	binary.BigEndian.PutUint16(h[2:], port)
	binary.BigEndian.PutUint16(h[4:], uint16(8+len(mark)))
	return append(h, mark...)
}

func echo(kind byte, mark []byte) []byte {
	b := concat([]byte{kind, 0, 0, 0, 0, 1, 0, 1}, mark)
	binary.BigEndian.PutUint16(b[2:], checksum(b))
	return b
}
