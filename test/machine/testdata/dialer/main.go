// Command dialer takes the place of the agent as the first process of a machine. It dials the ports of the host that it is
// told, over the machine's own connection to it, and tells what became of each.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"time"

	"github.com/ephemeral-run/ephemeral/guestagent/boot"
	"github.com/ephemeral-run/ephemeral/guestagent/proto"
	"github.com/ephemeral-run/ephemeral/guestagent/proto/mux"
	"github.com/ephemeral-run/ephemeral/guestagent/transport"
)

func main() {
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	if err := run(log); err != nil {
		log.Error("dialer failed", "error", err)
	}
	_ = boot.PowerOff()
	select {}
}

func run(log *slog.Logger) error {
	if err := boot.Start(log); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	device, err := transport.FindPort(ctx, proto.SerialPort)
	if err != nil {
		return err
	}
	port, err := transport.OpenPort(device)
	if err != nil {
		return err
	}
	way := transport.NewSerial(port, log)
	listener, err := way.Listen()
	if err != nil {
		return err
	}
	for {
		conn, err := listener.Accept()
		if err != nil {
			return fmt.Errorf("accept: %w", err)
		}
		if err := answer(way, conn); err != nil {
			log.Error("answer", "error", err)
		}
		_ = conn.Close()
	}
}

// answer reads a list of ports and writes what dialling each gave: "accepted", "refused", or an error.
func answer(way *transport.Serial, conn net.Conn) error {
	var ports []uint32
	if err := json.NewDecoder(conn).Decode(&ports); err != nil {
		return err
	}
	results := make(map[uint32]string)
	for _, p := range ports {
		results[p] = dial(way, p)
	}
	return json.NewEncoder(conn).Encode(results)
}

func dial(way *transport.Serial, port uint32) string {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	c, err := way.Dial(ctx, port)
	switch {
	case errors.Is(err, mux.ErrRefused):
		return "refused"
	case err != nil:
		return err.Error()
	}
	defer c.Close()
	if _, err := c.Write([]byte("hello")); err != nil {
		return err.Error()
	}
	return "accepted"
}
