// Package proto is what host and guest agree on: the ttrpc contract, the ports, and (in mux) how ports travel over a
// serial port.
package proto

//go:generate protoc --go_out=. --go_opt=paths=source_relative --go-ttrpc_out=. --go-ttrpc_opt=paths=source_relative agent.proto

// Ports of a machine.
const (
	// AgentPort is where the agent listens in the guest.
	AgentPort uint32 = 1024
	// BrokerPort is where the broker listens on the host.
	BrokerPort uint32 = 1025
)

// SerialPort is the name of the virtio-serial port that carries the multiplexer where there is no vsock.
const SerialPort = "run.ephemeral.agent"
