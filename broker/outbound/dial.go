package outbound

import (
	"context"
	"net"
	"net/http"
	"net/netip"
	"syscall"
	"time"
)

// Dialer dials what a policy allows.
type Dialer struct {
	Policy Policy
	// Resolver looks names up; nil: the host's.
	Resolver *net.Resolver
}

// DialContext connects to a TCP address. Each address that a name has is checked when it is dialled, after the last time
// that it was looked up. The error is ErrAddress when the policy forbids it.
func (d *Dialer) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	dialer := net.Dialer{
		Timeout: 10 * time.Second, KeepAlive: 30 * time.Second, Resolver: d.Resolver,
		ControlContext: func(_ context.Context, _, address string, _ syscall.RawConn) error {
			a, err := netip.ParseAddrPort(address)
			if err != nil {
				return ErrAddress
			}
			return d.Policy.Check(a)
		},
	}
	return dialer.DialContext(ctx, network, address)
}

// Transport returns an HTTP transport that uses the dialer, and no proxy: a proxy would dial instead of it. Close its idle
// connections in the end.
func (d *Dialer) Transport() *http.Transport {
	return &http.Transport{
		DialContext:            d.DialContext,
		ForceAttemptHTTP2:      true,
		MaxIdleConns:           256,
		MaxIdleConnsPerHost:    16,
		IdleConnTimeout:        60 * time.Second,
		TLSHandshakeTimeout:    10 * time.Second,
		ResponseHeaderTimeout:  5 * time.Minute,
		MaxResponseHeaderBytes: 64 << 10,
	}
}
