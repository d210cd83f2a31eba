package proto

import (
	"bytes"
	"encoding/binary"
	"net"
	"testing"

	"pgregory.net/rapid"
)

// writes notes what is written at once.
type writes struct {
	net.Conn
	all [][]byte
}

func (w *writes) Write(p []byte) (int, error) {
	w.all = append(w.all, bytes.Clone(p))
	return len(p), nil
}

// TestWhole: messages written in whatever parts leave in one each, the same bytes in the same order.
func TestWhole(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		under := &writes{}
		c := Whole(under)
		sizes := rapid.SliceOfN(rapid.IntRange(0, 300<<10), 1, 5).Draw(t, "sizes")
		var want [][]byte
		for i, size := range sizes {
			message := make([]byte, headerBytes+size)
			binary.BigEndian.PutUint32(message, uint32(size))
			for j := headerBytes; j < len(message); j++ {
				message[j] = byte(i + j)
			}
			want = append(want, bytes.Clone(message))
			// As a buffered writer does: the header comes with the first part.
			for len(message) > 0 {
				n := min(len(message), rapid.IntRange(headerBytes, 5000).Draw(t, "part"))
				if got, err := c.Write(message[:n]); got != n || err != nil {
					t.Fatalf("wrote %d of %d: %v", got, n, err)
				}
				message = message[n:]
			}
		}
		if len(under.all) != len(want) {
			t.Fatalf("%d messages left in %d writes", len(want), len(under.all))
		}
		for i := range want {
			if !bytes.Equal(under.all[i], want[i]) {
				t.Fatalf("message %d has changed", i)
			}
		}
	})
}

// TestWholeLetsThrough what is no message of ttrpc.
func TestWholeLetsThrough(t *testing.T) {
	for _, p := range [][]byte{[]byte("short"), bytes.Repeat([]byte{0xff}, 20)} {
		under := &writes{}
		if n, err := Whole(under).Write(p); n != len(p) || err != nil || len(under.all) != 1 {
			t.Errorf("%q: %d, %v, %d writes", p, n, err, len(under.all))
		}
	}
}
