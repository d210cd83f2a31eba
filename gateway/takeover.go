package gateway

import (
	"bufio"
	"io"
	"net"
	"strconv"

	"github.com/gofiber/fiber/v2"
)

// streamBuffer is how much of a stream is gathered before it is sent; what is larger is sent as it is.
const streamBuffer = 1 << 10

// takeOver answers with the header that c has by now and a body that write writes, and closes the connection at its end.
// The HTTP server would keep its buffers and two goroutines for each stream, for as long as it lasts; this keeps one.
func (s *Server) takeOver(c *fiber.Ctx, write func(*bufio.Writer)) {
	h := &c.Response().Header
	h.SetConnectionClose()
	h.SetContentLength(-1) // in chunks
	head := append([]byte(nil), h.Header()...)
	s.streams.Add(1)
	c.Context().HijackSetNoResponse(true)
	c.Context().Hijack(func(nc net.Conn) {
		defer s.streams.Done()
		out := &chunks{to: nc}
		w := bufio.NewWriterSize(out, streamBuffer)
		if _, err := nc.Write(head); err != nil {
			out.err = err // write finds out, and says so
		}
		head = nil
		write(w)
		if out.err == nil {
			_, _ = nc.Write([]byte("0\r\n\r\n")) // that the client is gone by now changes nothing
		}
	})
}

// chunks writes a body in chunks (RFC 9112, section 7.1), each write as one.
type chunks struct {
	to  io.Writer
	err error // the first; nothing is written after it
	buf [streamBuffer + 16]byte
}

// Write sends p as one chunk.
func (c *chunks) Write(p []byte) (int, error) {
	if c.err != nil || len(p) == 0 {
		return 0, c.err
	}
	b := strconv.AppendInt(c.buf[:0], int64(len(p)), 16)
	b = append(b, "\r\n"...)
	if len(p) <= streamBuffer {
		b = append(append(b, p...), "\r\n"...)
		_, c.err = c.to.Write(b)
	} else if _, c.err = c.to.Write(b); c.err == nil {
		if _, c.err = c.to.Write(p); c.err == nil {
			_, c.err = c.to.Write([]byte("\r\n"))
		}
	}
	if c.err != nil {
		return 0, c.err
	}
	return len(p), nil
}
