// Command dialer takes the place of the agent as the first process of a machine. It dials the ports of the host that it is
// told, over the machine's own connection to it, and tells what became of each. Told none, it writes garbage on that
// connection from then on.
package main

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
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
		switch none, err := answer(way, conn); {
		case err != nil:
			log.Error("answer", "error", err)
		case none:
			go babble(port)
		}
		_ = conn.Close()
	}
}

// answer reads a list of ports and writes what dialling each gave: "accepted", "refused", or an error.
func answer(way *transport.Serial, conn net.Conn) (none bool, err error) {
	var ports []uint32
	if err := json.NewDecoder(conn).Decode(&ports); err != nil {
		return false, err
	}
	results := make(map[uint32]string)
	for _, p := range ports {
		results[p] = dial(way, p)
	}
	return len(ports) == 0, json.NewEncoder(conn).Encode(results)
}

// babble writes random bytes between those of the sessions.
func babble(port io.Writer) {
	b := make([]byte, 32<<10)
	for {
		_, _ = rand.Read(b)
		if _, err := port.Write(b); err != nil {
			time.Sleep(time.Millisecond) // no host is connected
		}
	}
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
