package gateway

import (
	"net"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// statusGone is the status in log and metrics of a request whose client went away before its answer. It is never sent.
const statusGone = 499

// goneAfter is how old a request must be for the question whether its client is still there.
const goneAfter = 50 * time.Millisecond

// tcpOf is the TCP connection below nc, nil if there is none.
func tcpOf(nc net.Conn) *net.TCPConn {
	for {
		switch c := nc.(type) {
		case *net.TCPConn:
			return c
		case interface{ NetConn() net.Conn }: // TLS, and this package's own
			nc = c.NetConn()
		default:
			return nil
		}
	}
}

// States of a TCP connection whose other side has closed it (enum in Linux's net/tcp_states.h).
const (
	tcpClose     = 7
	tcpCloseWait = 8
	tcpLastAck   = 9
)

// gone tells whether the client has closed the connection, as far as the host knows by now.
func gone(nc net.Conn) bool {
	c := tcpOf(nc)
	if c == nil {
		return false
	}
	raw, err := c.SyscallConn()
	if err != nil {
		return true
	}
	var state uint8
	var asked error
	err = raw.Control(func(fd uintptr) {
		var info *unix.TCPInfo
		if info, asked = unix.GetsockoptTCPInfo(int(fd), syscall.IPPROTO_TCP, unix.TCP_INFO); asked == nil {
			state = info.State
		}
	})
	if err != nil {
		return true // closed on this side already
	}
	return asked == nil && (state == tcpClose || state == tcpCloseWait || state == tcpLastAck)
}
