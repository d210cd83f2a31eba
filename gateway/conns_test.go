package gateway

import (
	"errors"
	"net"
	"os"
	"syscall"
	"testing"
	"time"
)

// exhaustedListener fails as accept(2) does on a host that is out of resources, and then as the last error says.
type exhaustedListener struct {
	net.Listener
	errs []error
}

func (l *exhaustedListener) Accept() (net.Conn, error) {
	err := l.errs[0]
	if len(l.errs) > 1 {
		l.errs = l.errs[1:]
	}
	if err != nil {
		return nil, &net.OpError{Op: "accept", Net: "tcp", Err: os.NewSyscallError("accept4", err)}
	}
	client, server := net.Pipe()
	return server, client.Close()
}

func TestAHostOutOfDescriptorsDoesNotEndTheServer(t *testing.T) {
	l := newConns(&exhaustedListener{errs: []error{
		syscall.EMFILE, syscall.ENFILE, syscall.ENOBUFS, syscall.ENOMEM, syscall.ECONNABORTED, nil,
	}}, time.Second, 1, nil)
	c, err := l.Accept()
	if err != nil {
		t.Fatalf("accept failed: %v", err)
	}
	l.closeAll()
	if _, err := c.Write([]byte("x")); err == nil {
		t.Error("the connection is not among those that closeAll ends")
	}
}

func TestAClosedListenerEndsAccept(t *testing.T) {
	l := newConns(&exhaustedListener{errs: []error{syscall.EMFILE, syscall.EINVAL}}, time.Second, 1, nil)
	if _, err := l.Accept(); !errors.Is(err, syscall.EINVAL) {
		t.Errorf("accept returned %v, want %v", err, syscall.EINVAL)
	}
}
