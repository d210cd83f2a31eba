// Package outbound reaches the network for runs without ever reaching what lies on this side of it: the address that is
// dialled is checked in the moment in which it is dialled, whatever a name was resolved to before.
package outbound

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
)

// ErrAddress: an address, or a URL, must not be reached from here.
var ErrAddress = errors.New("address not allowed")

// special are ranges that are not of the public Internet, or that lead back to one that is not (IANA special-purpose
// address registries; RFC 6890 and those it lists). IPv6 outside 2000::/3 is refused as a whole.
var special = prefixes(
	"0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24", "192.0.2.0/24",
	"192.31.196.0/24", "192.52.193.0/24", "192.88.99.0/24", "192.168.0.0/16", "192.175.48.0/24", "198.18.0.0/15", "198.51.100.0/24",
	"203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4",
	"168.63.129.16/32", // a cloud's host service at a public address
	"2001::/23",        // IETF protocols, Teredo and ORCHID among them
	"2001:db8::/32", "2002::/16", "2620:4f:8000::/48", "3fff::/20",
)

// global is the only part of IPv6 that is given out.
var global = netip.MustParsePrefix("2000::/3")

func prefixes(all ...string) []netip.Prefix {
	out := make([]netip.Prefix, len(all))
	for i, s := range all {
		out[i] = netip.MustParsePrefix(s)
	}
	return out
}

// Policy says what may be dialled. The zero Policy allows every public address.
type Policy struct {
	// Allow lists ranges that are allowed although they are not public, such as that of an internal database.
	Allow []netip.Prefix
	// Ports are the only ones that may be dialled; empty: all.
	Ports []uint16
	// Local returns the addresses of this host, which are not dialled; nil: those of its interfaces.
	Local func() ([]net.Addr, error)
}

// ParsePrefixes reads ranges in CIDR notation.
func ParsePrefixes(all []string) ([]netip.Prefix, error) {
	var out []netip.Prefix
	for _, s := range all {
		p, err := netip.ParsePrefix(s)
		if err != nil {
			return nil, fmt.Errorf("address range %.64q: want e.g. 10.1.0.0/16", s)
		}
		out = append(out, p.Masked())
	}
	return out, nil
}

// Check returns ErrAddress when the address must not be dialled.
func (p Policy) Check(a netip.AddrPort) error {
	addr := a.Addr()
	switch {
	case !a.IsValid() || addr.Zone() != "" || a.Port() == 0:
		return ErrAddress
	case len(p.Ports) > 0 && !slices.Contains(p.Ports, a.Port()):
		return fmt.Errorf("port %d: %w", a.Port(), ErrAddress)
	}
	within := func(r netip.Prefix) bool { return r.Contains(addr) }
	if slices.ContainsFunc(p.Allow, within) {
		return nil
	}
	if addr.Is6() && !global.Contains(addr) || slices.ContainsFunc(special, within) {
		return ErrAddress // IPv4-mapped ones too, which the kernel would dial as IPv4
	}
	return p.notLocal(addr)
}

// notLocal refuses the host's own addresses: what listens there often trusts who comes from there.
func (p Policy) notLocal(addr netip.Addr) error {
	local := p.Local
	if local == nil {
		local = net.InterfaceAddrs
	}
	own, err := local()
	if err != nil {
		return fmt.Errorf("addresses of this host: %w: %w", err, ErrAddress)
	}
	for _, o := range own {
		if r, err := netip.ParsePrefix(o.String()); err == nil && r.Addr().Unmap() == addr {
			return ErrAddress
		}
	}
	return nil
}
