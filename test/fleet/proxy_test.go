package fleet

import (
	"net"
	"path/filepath"
	"sync"
	"testing"
)

// cable is a way to Redis that can be cut: then bytes go nowhere, and nobody is told.
type cable struct {
	path string
	cut  sync.RWMutex // held for writing while cut
}

// newCable listens on a socket of its own and passes everything on to the given one.
func newCable(t *testing.T, dir, to string) *cable {
	t.Helper()
	c := &cable{path: filepath.Join(dir, "cable.sock")}
	ln, err := net.Listen("unix", c.path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	go func() {
		for {
			near, err := ln.Accept()
			if err != nil {
				return
			}
			far, err := net.Dial("unix", to)
			if err != nil {
				near.Close()
				continue
			}
			go c.carry(near, far)
			go c.carry(far, near)
		}
	}()
	return c
}

// carry copies until either end closes.
func (c *cable) carry(from, to net.Conn) {
	defer from.Close()
	defer to.Close()
	b := make([]byte, 32<<10)
	for {
		n, err := from.Read(b)
		c.cut.RLock()
		_, failed := to.Write(b[:n])
		c.cut.RUnlock()
		if err != nil || failed != nil {
			return
		}
	}
}
