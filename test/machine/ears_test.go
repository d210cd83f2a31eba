package machine

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strconv"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// ears hear every frame on every interface of the host's namespace, and whatever reaches ports of the host.
type ears struct {
	ports []int
	wg    sync.WaitGroup
	stop  chan struct{}
	ends  []func() error

	mu    sync.Mutex
	marks [][]byte
	heard map[string]int
}

// listenOnHost opens the ears; they close with the test.
func listenOnHost(t *testing.T) *ears {
	t.Helper()
	e := &ears{stop: make(chan struct{}), heard: make(map[string]int)}
	t.Cleanup(func() {
		close(e.stop)
		for _, end := range e.ends {
			_ = end()
		}
		e.wg.Wait()
	})
	for range 3 {
		e.listen(t, 0)
	}
	for _, known := range []int{53, 80, 443} { // where guests would look first, unless the host uses them
		taken, err := occupy(known)
		for _, c := range taken {
			_ = c.Close()
		}
		if err != nil {
			t.Logf("not listening on port %d: %v", known, err)
			continue
		}
		e.listen(t, known)
	}
	e.sniff(t)
	return e
}

// listen takes a port, TCP and UDP, of both families; 0: any.
func (e *ears) listen(t *testing.T, port int) {
	t.Helper()
	var taken []io.Closer
	var err error
	for range 10 { // a free port of one kind need not be free of the others
		if taken, err = occupy(port); err == nil {
			break
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range taken {
		e.ends = append(e.ends, c.Close)
		switch l := c.(type) {
		case net.Listener:
			port = l.Addr().(*net.TCPAddr).Port
			e.wg.Go(func() { e.accept(l) })
		case net.PacketConn:
			e.wg.Go(func() { e.receive(l) })
		}
	}
	e.ports = append(e.ports, port)
}

// occupy listens on a port in all four ways, or in none.
func occupy(port int) (taken []io.Closer, err error) {
	defer func() {
		if err != nil {
			for _, c := range taken {
				_ = c.Close()
			}
		}
	}()
	for family, all := range map[string]string{"4": "0.0.0.0", "6": "::"} {
		l, err := net.Listen("tcp"+family, net.JoinHostPort(all, strconv.Itoa(port)))
		if err != nil {
			return taken, err
		}
		taken, port = append(taken, l), l.Addr().(*net.TCPAddr).Port
		p, err := net.ListenPacket("udp"+family, net.JoinHostPort(all, strconv.Itoa(port)))
		if err != nil {
			return taken, err
		}
		taken = append(taken, p)
	}
	return taken, nil
}

func (e *ears) accept(l net.Listener) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		e.hear("TCP connection")
		_ = c.Close()
	}
}

func (e *ears) receive(p net.PacketConn) {
	b := make([]byte, 2048)
	for {
		n, _, err := p.ReadFrom(b)
		if err != nil {
			return
		}
		if e.marked(b[:n]) {
			e.hear("UDP datagram")
		}
	}
}

func (e *ears) sniff(t *testing.T) {
	t.Helper()
	all := binary.NativeEndian.Uint16([]byte{unix.ETH_P_ALL >> 8, unix.ETH_P_ALL})
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, int(all))
	if err != nil {
		t.Fatal(err)
	}
	e.ends = append(e.ends, func() error { e.wg.Wait(); return unix.Close(fd) })
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Usec: 50_000}); err != nil {
		t.Fatal(err)
	}
	e.wg.Go(func() {
		b := make([]byte, 65536)
		for {
			select {
			case <-e.stop:
				return
			default:
			}
			if n, err := unix.Read(fd, b); err == nil && e.marked(b[:n]) {
				e.hear("frame")
			}
		}
	})
}

// listenFor adds what a frame is known by: a payload, a hardware address.
func (e *ears) listenFor(mark []byte) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.marks = append(e.marks, mark)
}

func (e *ears) marked(b []byte) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, m := range e.marks {
		if bytes.Contains(b, m) {
			return true
		}
	}
	return false
}

func (e *ears) hear(what string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.heard[what]++
}

// all is what was heard so far.
func (e *ears) all() map[string]int {
	e.mu.Lock()
	defer e.mu.Unlock()
	heard := make(map[string]int)
	for k, v := range e.heard {
		heard[k] = v
	}
	return heard
}

// prove sends to the host from the host: ears that hear nothing of it would prove nothing.
func (e *ears) prove(t *testing.T, mark []byte) {
	t.Helper()
	for _, address := range []string{"127.0.0.1", "::1"} {
		to := net.JoinHostPort(address, strconv.Itoa(e.ports[0]))
		c, err := net.DialTimeout("tcp", to, 5*time.Second)
		if err != nil {
			t.Errorf("the host does not reach its own listener: %v", err)
			continue
		}
		_ = c.Close()
		u, err := net.Dial("udp", to)
		if err == nil {
			_, err = u.Write(mark)
			_ = u.Close()
		}
		if err != nil {
			t.Error(err)
		}
	}
	eventually(t, func() error {
		if h := e.all(); h["TCP connection"] < 2 || h["UDP datagram"] < 2 || h["frame"] < 2 {
			return fmt.Errorf("of its own packets the host heard %v only: the test would hear nothing", h)
		}
		return nil
	})
}

// hostAddresses are all of the host, by family, without zones.
func hostAddresses(t *testing.T) (v4, v6 []string) {
	t.Helper()
	found, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range found {
		p, err := netip.ParsePrefix(a.String())
		switch {
		case err != nil:
			t.Fatal(err)
		case p.Addr().Is4():
			v4 = append(v4, p.Addr().String())
		case p.Addr().IsLinkLocalUnicast():
			v6 = append(v6, p.Addr().WithZone("eth0").String()) // as the guest would write it
		default:
			v6 = append(v6, p.Addr().String())
		}
	}
	return v4, v6
}
