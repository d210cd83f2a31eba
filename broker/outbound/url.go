package outbound

import (
	"fmt"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/net/idna"
)

const maxURL = 8 << 10

// hidden are names that are never public (RFC 6761, RFC 6762, RFC 8375 and what clouds call their own services).
var hidden = []string{"localhost", "local", "internal", "intranet", "lan", "home.arpa", "localdomain", "corp", "home", "private", "test", "invalid", "onion", "in-addr.arpa", "ip6.arpa"}

// ParseURL reads a URL that a guest, or a server that redirects, gave: http or https, of a public name or address, on a
// port that the policy allows, without user and password. The error is ErrAddress and says what is wrong.
func (p Policy) ParseURL(s string) (*url.URL, error) {
	refuse := func(format string, args ...any) (*url.URL, error) {
		return nil, fmt.Errorf(format+": %w", append(args, ErrAddress)...)
	}
	if len(s) > maxURL || strings.ContainsFunc(s, func(r rune) bool { return r <= ' ' || r == 0x7f || r == '\\' }) {
		return refuse("the URL is too long or has white space, control characters or a backslash")
	}
	u, err := url.Parse(s)
	switch {
	case err != nil:
		return refuse("it is no URL")
	case u.Scheme != "http" && u.Scheme != "https":
		return refuse("the scheme must be http or https")
	case u.User != nil:
		return refuse("the URL has a user or a password")
	case u.Opaque != "" || u.Host == "":
		return refuse("the URL has no host")
	}
	port, err := p.port(u)
	if err != nil {
		return nil, err
	}
	host, err := p.host(u.Hostname(), port)
	if err != nil {
		return nil, err
	}
	u.Host, u.Fragment, u.RawFragment = host, "", ""
	if u.Scheme == "http" && port != 80 || u.Scheme == "https" && port != 443 {
		u.Host += ":" + strconv.Itoa(int(port))
	}
	return u, nil
}

// port is the URL's port, given or its scheme's.
func (p Policy) port(u *url.URL) (uint16, error) {
	port := uint16(80)
	if u.Scheme == "https" {
		port = 443
	}
	if strings.HasSuffix(u.Host, ":") {
		return 0, fmt.Errorf("the port is empty: %w", ErrAddress)
	}
	if s := u.Port(); s != "" {
		n, err := strconv.ParseUint(s, 10, 16)
		if err != nil || n == 0 || strconv.FormatUint(n, 10) != s {
			return 0, fmt.Errorf("the port makes no sense: %w", ErrAddress)
		}
		port = uint16(n)
	}
	if len(p.Ports) > 0 && !slices.Contains(p.Ports, port) {
		return 0, fmt.Errorf("port %d is not allowed: %w", port, ErrAddress)
	}
	return port, nil
}

// host is the host in the form in which it is dialled: an address, or an ASCII name.
func (p Policy) host(name string, port uint16) (string, error) {
	if a, err := netip.ParseAddr(name); err == nil {
		if err := p.Check(netip.AddrPortFrom(a, port)); err != nil {
			return "", fmt.Errorf("the address is not public: %w", err)
		}
		if a.Is6() {
			return "[" + a.String() + "]", nil
		}
		return a.String(), nil
	}
	ascii, err := idna.Lookup.ToASCII(name)
	if err != nil {
		return "", fmt.Errorf("the host is no name: %w", ErrAddress)
	}
	ascii = strings.TrimSuffix(strings.ToLower(ascii), ".")
	if again, err := idna.Lookup.ToASCII(ascii); err != nil || again != ascii {
		return "", fmt.Errorf("the host is no name: %w", ErrAddress)
	}
	labels := strings.Split(ascii, ".")
	last := labels[len(labels)-1]
	if numeric(last) {
		return "", fmt.Errorf("the host is an address in an odd form: %w", ErrAddress)
	}
	if len(ascii) > 253 || slices.ContainsFunc(labels, func(l string) bool { return l == "" || len(l) > 63 }) {
		return "", fmt.Errorf("the host is no name: %w", ErrAddress)
	}
	if p.named(ascii, labels) {
		return "", fmt.Errorf("the host is not of the public Internet: %w", ErrAddress)
	}
	return ascii, nil
}

// named tells whether the name by itself says that it is not public. With Allow set private names are the operator's wish.
func (p Policy) named(ascii string, labels []string) bool {
	if len(p.Allow) > 0 {
		return false
	}
	return len(labels) == 1 || slices.ContainsFunc(hidden, func(h string) bool { return ascii == h || strings.HasSuffix(ascii, "."+h) })
}

// numeric tells whether a name that ends in this label is read as an IPv4 address by some: "127.1", "0x7f000001", "2130706433"
// (WHATWG URL, "ends in a number").
func numeric(last string) bool {
	if last == "" {
		return false
	}
	if strings.Trim(last, "0123456789") == "" {
		return true
	}
	rest, hex := strings.CutPrefix(last, "0x")
	return hex && strings.Trim(rest, "0123456789abcdef") == ""
}
