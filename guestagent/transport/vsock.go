package transport

import (
	"context"
	"fmt"
	"net"

	"github.com/mdlayher/vsock"

	"github.com/ephemeral-run/ephemeral/guestagent/proto"
)

// Vsock returns the transport over AF_VSOCK, or an error when the machine has no vsock device: the module alone makes
// /dev/vsock, but only a device gives the machine a context id of its own, vsock(7).
func Vsock() (Transport, error) {
	cid, err := vsock.ContextID()
	if err != nil {
		return nil, fmt.Errorf("read vsock context id: %w", err)
	}
	// 0 to 2 are the hypervisor, loopback and the host; all ones is "any", what there is without a device.
	if cid <= vsock.Host || cid == 1<<32-1 {
		return nil, fmt.Errorf("no vsock device: context id is %d", cid)
	}
	return vsockTransport{}, nil
}

type vsockTransport struct{}

func (vsockTransport) Name() string { return "vsock" }

func (vsockTransport) Listen() (net.Listener, error) {
	l, err := vsock.Listen(proto.AgentPort, nil)
	if err != nil {
		return nil, fmt.Errorf("listen on vsock port %d: %w", proto.AgentPort, err)
	}
	return hostOnly{l}, nil
}

func (vsockTransport) Dial(ctx context.Context, port uint32) (net.Conn, error) {
	c, err := vsock.DialContext(ctx, vsock.Host, port, nil)
	if err != nil {
		return nil, fmt.Errorf("dial host port %d: %w", port, err)
	}
	return c, nil
}

// hostOnly turns away what comes from inside the machine: any process may open vsock connections, and the agent does
// as root what it is told.
type hostOnly struct{ net.Listener }

func (l hostOnly) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if from, ok := c.RemoteAddr().(*vsock.Addr); ok && from.ContextID == vsock.Host {
			return c, nil
		}
		_ = c.Close()
	}
}
