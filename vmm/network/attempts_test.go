package network

import (
	"net"
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/net/dns/dnsmessage"
	"golang.org/x/sys/unix"
)

// question is a DNS message that asks for a name.
func question(t testing.TB, name string) []byte {
	t.Helper()
	b := dnsmessage.NewBuilder(nil, dnsmessage.Header{RecursionDesired: true})
	if err := b.StartQuestions(); err != nil {
		t.Fatal(err)
	}
	if err := b.Question(dnsmessage.Question{Name: dnsmessage.MustNewName(name), Type: dnsmessage.TypeA, Class: dnsmessage.ClassINET}); err != nil {
		t.Fatal(err)
	}
	m, err := b.Finish()
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// frames are what a guest might send, with what is told of it.
func frames(t testing.TB) []struct {
	frame []byte
	want  Attempt
} {
	to, from := net.HardwareAddr{2, 0, 0, 0, 0, 1}, net.HardwareAddr{2, 0, 0, 0, 0, 2}
	four, six := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")
	ip4 := func(protocol byte, p []byte) []byte {
		return ethernet(to, from, unix.ETH_P_IP, ipv4(four, protocol, p))
	}
	fragment := ipv4(four, unix.IPPROTO_UDP, datagram(53, nil))
	fragment[7] = 1
	return []struct {
		frame []byte
		want  Attempt
	}{
		{ip4(unix.IPPROTO_TCP, syn(443, nil)), Attempt{Protocol: "tcp", Address: four, Port: 443}},
		{ip4(unix.IPPROTO_UDP, datagram(9, []byte("x"))), Attempt{Protocol: "udp", Address: four, Port: 9}},
		{ip4(unix.IPPROTO_UDP, datagram(53, question(t, "Example.com."))), Attempt{Protocol: "udp", Address: four, Port: 53, Name: "example.com"}},
		{ip4(unix.IPPROTO_UDP, datagram(53, question(t, "\x1b[2J\".com."))), Attempt{Protocol: "udp", Address: four, Port: 53, Name: "??2j?.com"}},
		{ip4(unix.IPPROTO_UDP, datagram(53, []byte("no question"))), Attempt{Protocol: "udp", Address: four, Port: 53}},
		{ip4(unix.IPPROTO_ICMP, echo(8, nil)), Attempt{Protocol: "icmp", Address: four}},
		{ip4(132, nil), Attempt{Protocol: "ip-132", Address: four}},
		{ethernet(to, from, unix.ETH_P_IP, fragment), Attempt{Protocol: "udp", Address: four}},
		{ethernet(to, from, unix.ETH_P_IPV6, ipv6(six, unix.IPPROTO_TCP, syn(22, nil))), Attempt{Protocol: "tcp", Address: six, Port: 22}},
		{ethernet(to, from, unix.ETH_P_IPV6, ipv6(six, unix.IPPROTO_ICMPV6, echo(135, nil))), Attempt{Protocol: "icmpv6", Address: six}},
		{ethernet(to, from, unix.ETH_P_ARP, concat(make([]byte, 24), []byte{10, 0, 0, 1})), Attempt{Protocol: "arp", Address: netip.MustParseAddr("10.0.0.1")}},
		{ethernet(to, from, 0x88b5, []byte("x")), Attempt{Protocol: "ethernet-88b5"}},
		{ethernet(to, from, unix.ETH_P_IP, []byte{0x45, 0, 0}), Attempt{Protocol: "ethernet-0800"}},
		{ethernet(to, from, unix.ETH_P_IP, concat([]byte{0x4f}, make([]byte, 19))), Attempt{Protocol: "ip-0", Address: netip.MustParseAddr("0.0.0.0")}},
	}
}

func TestAttempts(t *testing.T) {
	n := open(t, "attempts-"+randomHex(t)[:6])
	tap, other := newTap(t, n), newTap(t, n)
	want := map[Attempt]int{}
	for i, f := range frames(t) {
		if got := parseFrame(f.frame); got != f.want {
			t.Errorf("frame %d: %+v, want %+v", i, got, f.want)
		}
		for range i + 1 {
			if _, err := tap.File.Write(concat(make([]byte, 10), f.frame)); err != nil { // after an empty virtio-net header
				t.Fatal(err)
			}
			want[f.want]++
		}
	}
	if err := tap.Close(); err != nil {
		t.Fatal(err)
	}
	got := map[Attempt]int{}
	before := 1 << 30
	for _, a := range tap.Attempts().List {
		if a.Packets > before {
			t.Errorf("%+v is not in order", a)
		}
		before = a.Packets
		packets := a.Packets
		a.Packets = 0
		got[a] = packets
	}
	if d := cmp.Diff(want, got, cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); d != "" || tap.Attempts().More {
		t.Errorf("more %v: %s", tap.Attempts().More, d)
	}
	if err := other.Close(); err != nil {
		t.Fatal(err)
	}
	if a := other.Attempts(); len(a.List) != 0 || a.More {
		t.Errorf("the machine beside: %+v", a)
	}
}

// TestAttemptsOfAFlood: what is kept of a flood is bounded, and is its beginning.
func TestAttemptsOfAFlood(t *testing.T) {
	n := open(t, "flood-"+randomHex(t)[:6])
	tap := newTap(t, n)
	first := frames(t)[0]
	flood := ethernet(net.HardwareAddr{2, 0, 0, 0, 0, 1}, tap.MAC, 0x88b5, make([]byte, 1500))
	for i := range 20_000 {
		frame := flood
		if i == 0 {
			frame = first.frame
		}
		if _, err := tap.File.Write(concat(make([]byte, 10), frame)); err != nil {
			t.Fatal(err)
		}
	}
	if err := tap.Close(); err != nil {
		t.Fatal(err)
	}
	a := tap.Attempts()
	packets, _, err := tap.Counters()
	if err != nil || packets != 20_000 || !a.More || len(a.List) != 2 || a.List[0].Protocol != "ethernet-88b5" || a.List[1].Protocol != "tcp" {
		t.Errorf("%d packets, %v: %+v", packets, err, a)
	}
	if kept := a.List[0].Packets; kept > maxWatched {
		t.Errorf("%d packets kept", kept)
	} else {
		t.Logf("%d packets kept", kept)
	}
}

// TestAttemptsToMany: a scan of many addresses is cut off.
func TestAttemptsToMany(t *testing.T) {
	n := open(t, "scan-"+randomHex(t)[:6])
	tap := newTap(t, n)
	for port := range uint16(100) {
		frame := ethernet(net.HardwareAddr{2, 0, 0, 0, 0, 1}, tap.MAC, unix.ETH_P_IP, ipv4(netip.MustParseAddr("192.0.2.1"), unix.IPPROTO_TCP, syn(port+1, nil)))
		if _, err := tap.File.Write(concat(make([]byte, 10), frame)); err != nil {
			t.Fatal(err)
		}
	}
	if err := tap.Close(); err != nil {
		t.Fatal(err)
	}
	if a := tap.Attempts(); len(a.List) != maxAttempts || !a.More {
		t.Errorf("%d attempts, more %v", len(a.List), a.More)
	}
}

func FuzzAttempt(f *testing.F) {
	for _, c := range frames(f) {
		f.Add(c.frame)
	}
	f.Fuzz(func(t *testing.T, frame []byte) {
		a := parseFrame(frame)
		if a.Protocol == "" || len(a.Name) > 255 {
			t.Errorf("%+v", a)
		}
		for i := range len(a.Name) {
			if c := a.Name[i]; c < '!' || c > '~' {
				t.Errorf("name %q", a.Name)
			}
		}
	})
}
