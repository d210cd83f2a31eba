package outbound

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"sync"
	"testing"

	"go.uber.org/goleak"
	"golang.org/x/net/dns/dnsmessage"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var web = Policy{Ports: []uint16{80, 443}}

// hostile are URLs that would reach something that is not public, or that not everybody reads in the same way.
var hostile = []string{
	"http://127.0.0.1/", "http://127.1/", "http://127.0.1/", "http://2130706433/", "http://0x7f000001/", "http://0x7f.0.0.1/", "http://0177.0.0.1/",
	"http://017700000001/", "http://127.0.0.1./", "http://1.1.1.1.1/", "http://0/", "http://0.0.0.0/", "http://localhost/", "http://LOCALHOST/",
	"http://localhost./", "http://a.localhost/", "http://ｌocalhost/", "http://①②⑦.0.0.1/", "http://127。0。0。1/",
	"http://10.0.0.1/", "http://172.16.0.1/", "http://172.31.255.255/", "http://192.168.1.1/", "http://100.64.0.1/", "http://100.127.255.254/",
	"http://169.254.169.254/latest/meta-data/", "http://169.254.170.2/", "http://100.100.100.200/", "http://192.0.0.192/", "http://168.63.129.16/",
	"http://metadata.google.internal/", "http://metadata/", "http://instance-data/", "http://[fd00:ec2::254]/",
	"http://224.0.0.1/", "http://239.255.255.250/", "http://255.255.255.255/", "http://240.0.0.1/", "http://192.0.2.1/", "http://198.18.0.1/",
	"http://198.51.100.1/", "http://203.0.113.1/", "http://192.88.99.1/",
	"http://[::1]/", "http://[::]/", "http://[::ffff:127.0.0.1]/", "http://[::ffff:7f00:1]/", "http://[::ffff:10.0.0.1]/", "http://[::127.0.0.1]/",
	"http://[::ffff:8.8.8.8]/", "http://[0:0:0:0:0:ffff:a9fe:a9fe]/", "http://[64:ff9b::7f00:1]/", "http://[64:ff9b::169.254.169.254]/", "http://[64:ff9b:1::a00:1]/",
	"http://[2002:7f00:1::]/", "http://[2002:a9fe:a9fe::1]/", "http://[2001:0:7f00:1::1]/", "http://[fc00::1]/", "http://[fd12:3456::1]/", "http://[fe80::1]/",
	"http://[fe80::1%25eth0]/", "http://[2606:4700::1111%25eth0]/", "http://[fec0::1]/", "http://[ff02::1]/", "http://[100::1]/", "http://[2001:db8::1]/",
	"http://[3fff::1]/", "http://[5f00::1]/", "http://[4000::1]/",
	"http://example.com:22/", "http://example.com:6379/", "http://example.com:8080/", "http://example.com:0/", "http://example.com:65536/", "http://example.com:080/", "http://example.com:/",
	"http://user@example.com/", "http://user:pw@example.com/", "http://example.com@127.0.0.1/", "http://127.0.0.1#@example.com/", "http://127.0.0.1\\@example.com/",
	"file:///etc/passwd", "gopher://example.com/", "ftp://example.com/", "dict://example.com:11211/", "javascript:alert(1)", "data:text/plain,x", "unix:///run/docker.sock",
	"//example.com/", "example.com", "", "http://", "http:///", "http:example.com", "http://?x", " http://example.com/", "http://exa mple.com/", "http://example.com/\r\nX: y",
	"http://example.com\x00.evil/", "http://router/", "http://printer.local/", "http://db.internal/", "http://a..b/", "http://" + string(make([]byte, 9000)),
	"http://service.cluster.local/", "http://1.0.0.127.in-addr.arpa/", "http://abc.onion/", "http://-/", "http://%31%32%37.0.0.1/", "http://127.0.0.1%2f@example.com/",
}

func TestHostileURLs(t *testing.T) {
	for _, s := range hostile {
		if u, err := web.ParseURL(s); !errors.Is(err, ErrAddress) {
			t.Errorf("%.80q is taken as %v, %v", s, u, err)
		}
	}
}

func TestPublicURLs(t *testing.T) {
	for in, want := range map[string]string{
		"https://example.com":              "https://example.com",
		"HTTP://EXAMPLE.com./a?b=c#d":      "http://example.com/a?b=c",
		"https://bücher.example:443/ä":     "https://xn--bcher-kva.example/%C3%A4",
		"http://1.1.1.1/":                  "http://1.1.1.1/",
		"https://[2606:4700:4700::1111]/x": "https://[2606:4700:4700::1111]/x",
		"http://example.com:443/":          "http://example.com:443/",
	} {
		u, err := web.ParseURL(in)
		if err != nil || u.String() != want {
			t.Errorf("%q: %v, %v; want %q", in, u, err, want)
		}
	}
}

func TestAllowedRanges(t *testing.T) {
	p := Policy{Allow: []netip.Prefix{netip.MustParsePrefix("10.1.0.0/16")}}
	for s, want := range map[string]bool{"10.1.2.3:5432": true, "10.2.0.1:5432": false, "127.0.0.1:5432": false, "8.8.8.8:53": true, "10.1.2.3:0": false} {
		if err := p.Check(netip.MustParseAddrPort(s)); (err == nil) != want {
			t.Errorf("%s: %v", s, err)
		}
	}
}

func TestOwnAddresses(t *testing.T) {
	p := Policy{Local: func() ([]net.Addr, error) {
		return []net.Addr{&net.IPNet{IP: net.ParseIP("8.8.4.4"), Mask: net.CIDRMask(24, 32)}}, nil
	}}
	if err := p.Check(netip.MustParseAddrPort("8.8.4.4:80")); !errors.Is(err, ErrAddress) {
		t.Errorf("the host's own public address: %v", err)
	}
	if err := p.Check(netip.MustParseAddrPort("8.8.4.5:80")); err != nil {
		t.Errorf("its neighbour: %v", err)
	}
	p.Local = func() ([]net.Addr, error) { return nil, errors.New("no") }
	if err := p.Check(netip.MustParseAddrPort("8.8.4.5:80")); !errors.Is(err, ErrAddress) {
		t.Errorf("own addresses unknown: %v", err)
	}
}

// nameServer is a double of a name server whose answers change with every question.
func nameServer(t *testing.T, answers ...string) *net.Resolver {
	t.Helper()
	conn, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	asked := 0
	done := make(chan struct{})
	go func() {
		defer close(done)
		buf := make([]byte, 1500)
		for {
			n, from, err := conn.ReadFrom(buf)
			if err != nil {
				return
			}
			var m dnsmessage.Message
			if m.Unpack(buf[:n]) != nil || len(m.Questions) != 1 {
				continue
			}
			q := m.Questions[0]
			m.Response, m.RecursionAvailable = true, true
			m.Additionals = nil
			mu.Lock()
			addr := netip.MustParseAddr(answers[min(asked, len(answers)-1)])
			header := dnsmessage.ResourceHeader{Name: q.Name, Class: q.Class, TTL: 0}
			switch {
			case q.Type == dnsmessage.TypeA && addr.Is4():
				m.Answers = []dnsmessage.Resource{{Header: header, Body: &dnsmessage.AResource{A: addr.As4()}}}
				asked++
			case q.Type == dnsmessage.TypeAAAA && addr.Is6():
				m.Answers = []dnsmessage.Resource{{Header: header, Body: &dnsmessage.AAAAResource{AAAA: addr.As16()}}}
				asked++
			}
			mu.Unlock()
			if out, err := m.Pack(); err == nil {
				_, _ = conn.WriteTo(out, from)
			}
		}
	}()
	t.Cleanup(func() { conn.Close(); <-done })
	return &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "udp", conn.LocalAddr().String())
	}}
}

// TestNamesOfPrivateAddresses: a public name that has a private address is not dialled.
func TestNamesOfPrivateAddresses(t *testing.T) {
	reached := false
	server := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { reached = true }))
	defer server.Close()
	port := server.Listener.Addr().(*net.TCPAddr).Port
	for _, a := range []string{"127.0.0.1", "10.0.0.1", "169.254.169.254", "100.64.0.1", "::1", "::ffff:127.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::", "fe80::1"} {
		d := &Dialer{Resolver: nameServer(t, a)}
		conn, err := d.DialContext(t.Context(), "tcp", fmt.Sprintf("public.example.com:%d", port))
		if conn != nil || !errors.Is(err, ErrAddress) {
			t.Errorf("%s: %v", a, err)
		}
	}
	if reached {
		t.Error("the server was reached")
	}
}

// TestRebinding: a name that is public when the URL is checked and private when it is dialled is not dialled.
func TestRebinding(t *testing.T) {
	reached := false
	server := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { reached = true }))
	defer server.Close()
	resolver := nameServer(t, "93.184.216.34", "127.0.0.1")
	if all, err := resolver.LookupHost(t.Context(), "rebind.example.com"); err != nil || all[0] != "93.184.216.34" {
		t.Fatalf("%v, %v", all, err)
	}
	d := &Dialer{Resolver: resolver}
	_, err := d.DialContext(t.Context(), "tcp", fmt.Sprintf("rebind.example.com:%d", server.Listener.Addr().(*net.TCPAddr).Port))
	if !errors.Is(err, ErrAddress) || reached {
		t.Errorf("%v, reached %v", err, reached)
	}
}

// TestTransportUsesNoProxy: a proxy of the environment would dial what the policy forbids.
func TestTransportUsesNoProxy(t *testing.T) {
	t.Setenv("HTTP_PROXY", "http://127.0.0.1:1")
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "ok") }))
	defer server.Close()
	d := &Dialer{Policy: Policy{Allow: []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}}}
	transport := d.Transport()
	defer transport.CloseIdleConnections()
	resp, err := (&http.Client{Transport: transport}).Get(server.URL)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if b, err := io.ReadAll(resp.Body); err != nil || string(b) != "ok" {
		t.Errorf("%q, %v", b, err)
	}
}

// FuzzURL: what is accepted is http or https of a public address or a name that is no address, without credentials, and is
// read the same again.
func FuzzURL(f *testing.F) {
	for _, s := range hostile {
		f.Add(s)
	}
	f.Add("https://example.com:443/a?b#c")
	f.Fuzz(func(t *testing.T, s string) {
		u, err := web.ParseURL(s)
		if err != nil {
			return
		}
		read, err := url.Parse(u.String())
		if err != nil || read.Host != u.Host || read.User != nil || read.Scheme != "http" && read.Scheme != "https" {
			t.Fatalf("%q becomes %q: %v", s, u, err)
		}
		if a, err := netip.ParseAddr(u.Hostname()); err == nil {
			if web.Check(netip.AddrPortFrom(a, 80)) != nil {
				t.Fatalf("%q reaches %s", s, a)
			}
		} else if ip := net.ParseIP(u.Hostname()); ip != nil {
			t.Fatalf("%q is the address %s for some", s, ip)
		}
		if again, err := web.ParseURL(u.String()); err != nil || again.String() != u.String() {
			t.Fatalf("%q becomes %q, and that %v: %v", s, u, again, err)
		}
	})
}
