// Package transport is how the agent and the host reach each other's ports: over vsock where the machine has it, else
// over the multiplexer on a virtio-serial port.
package transport

import (
	"context"
	"errors"
	"net"
)

// Transport is one way to the host. Its methods are safe for concurrent use.
type Transport interface {
	// Listen takes the connections that the host, and nobody else, opens to the agent's port.
	Listen() (net.Listener, error)
	// Dial connects to a port of the host.
	Dial(ctx context.Context, port uint32) (net.Conn, error)
	// Name is "vsock" or "serial".
	Name() string
}

// ErrNoHost: there is no host on the other end at the moment.
var ErrNoHost = errors.New("no host connected")
