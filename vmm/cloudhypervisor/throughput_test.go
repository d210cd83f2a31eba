package cloudhypervisor_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/ephemeral-run/ephemeral/vmm"
	"github.com/ephemeral-run/ephemeral/vmm/vmmtest"
)

func TestRealThroughput(t *testing.T) {
	h := vmmtest.Harness{Driver: realDriver(t), Image: image(t), Slow: slow(t)}
	tpl := h.MakeTemplate(t, t.TempDir())
	dir := t.TempDir()
	m, err := h.Driver.Restore(t.Context(), tpl, vmm.Spec{ID: "thr", Dir: dir, Launcher: &vmmtest.Launcher{}})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	if err := m.Resume(t.Context()); err != nil {
		t.Fatal(err)
	}
	a := vmmtest.NewAgent(m.Dial)
	const n = 16 << 20
	cpu := func() string {
		s, _ := m.Stats()
		b, _ := os.ReadFile("/proc/stat")
		line, _, _ := strings.Cut(string(b), "\n")
		return fmt.Sprintf("vmm cpu %v; %s", s.CPU, line)
	}
	time1 := func(name string, fn func() error) {
		c0 := cpu()
		begin := time.Now()
		err := fn()
		took := time.Since(begin)
		t.Logf("%-28s %8v %6.2f MiB/s err=%v\n    %s\n    %s", name, took.Round(time.Millisecond), float64(n)/(1<<20)/took.Seconds(), err, c0, cpu())
	}
	// raw
	go func() {
		_ = a.Run(context.Background(), nil, io.Discard, "python3", "-c", `
import socket
s=socket.socket(socket.AF_VSOCK); s.bind((socket.VMADDR_CID_ANY,5000)); s.listen()
while True:
    c,_=s.accept()
    k=c.recv(1)
    if k==b's':
        n=16<<20; b=bytes(65536)
        while n>0: c.sendall(b); n-=65536
    elif k==b'e':
        while True:
            b=c.recv(1)
            if not b: break
            c.sendall(b)
    else:
        n=16<<20
        while n>0: n-=len(c.recv(65536))
        c.sendall(b'k')
    c.close()
`)
	}()
	raw := func(kind byte) error {
		c, err := m.Dial(t.Context(), 5000)
		if err != nil {
			return err
		}
		defer c.Close()
		c.SetDeadline(time.Now().Add(2 * time.Minute))
		c.Write([]byte{kind})
		switch kind {
		case 's':
			_, err = io.CopyN(io.Discard, c, n)
		case 'e':
			var b [1]byte
			for range 200 {
				c.Write([]byte{1})
				if _, err = io.ReadFull(c, b[:]); err != nil {
					return err
				}
			}
		case 'r':
			buf := make([]byte, 32<<10)
			for i := 0; i < n; i += len(buf) {
				if _, err = c.Write(buf); err != nil {
					return err
				}
			}
			_, err = io.ReadFull(c, buf[:1])
		}
		return err
	}
	raw('s')
	time1("raw to host", func() error { return raw('s') })
	time1("raw to guest", func() error { return raw('r') })
	time1("200 echoes", func() error { return raw('e') })
	run := func(in io.Reader, args ...string) func() error {
		return func() error { return a.Run(context.Background(), in, io.Discard, args...) }
	}
	time1("true", run(nil, "true"))
	time1("in guest: head|cat", run(nil, "sh", "-c", fmt.Sprintf("head -c %d /dev/zero | cat >/dev/null", n)))
	time1("in guest: seq|head", run(nil, "sh", "-c", fmt.Sprintf("seq 100000000 | head -c %d >/dev/null", n)))
	time1("in guest: sha256sum", run(nil, "sh", "-c", fmt.Sprintf("head -c %d /dev/zero | sha256sum", n)))
	time1("exec dd 32k", run(nil, "dd", "if=/dev/zero", "bs=32k", fmt.Sprintf("count=%d", n/32768), "status=none"))
	time1("exec dd 4k", run(nil, "dd", "if=/dev/zero", "bs=4k", fmt.Sprintf("count=%d", n/4096), "status=none"))
	time1("exec head", run(nil, "head", "-c", fmt.Sprint(n), "/dev/zero"))
	time1("exec seq|head", run(nil, "sh", "-c", fmt.Sprintf("seq 100000000 | head -c %d", n)))
	time1("exec stdin >/dev/null", run(bytes.NewReader(make([]byte, n)), "sh", "-c", "cat >/dev/null"))
	time1("exec stdin sha256sum", run(bytes.NewReader(make([]byte, n)), "sha256sum"))
	time1("host sha256", func() error { s := sha256.New(); _, err := s.Write(make([]byte, n)); return err })
}
