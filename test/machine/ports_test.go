package machine

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/cavaliergopher/cpio"

	"github.com/ephemeral-run/ephemeral/guestagent/proto"
	"github.com/ephemeral-run/ephemeral/vmm"
	"github.com/ephemeral-run/ephemeral/vmm/vmmtest"
)

// TestBrokersPortAlone: over the connection that a machine has with its host, a guest that took the agent's place reaches
// the broker's port, while somebody listens there, and no other.
func TestBrokersPortAlone(t *testing.T) {
	t.Parallel()
	m := bootDialer(t)
	ports := []uint32{0, 1, 22, 53, 80, 443, 1023, proto.AgentPort, proto.BrokerPort, proto.BrokerPort + 1, 6379, 8080, 65535, 65536, 1 << 31, 1<<32 - 1}
	for range 3 { // ports on which the host does listen, to others
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		ports = append(ports, uint32(l.Addr().(*net.TCPAddr).Port))
	}
	check := func(broker string) {
		t.Helper()
		got := dialFrom(t, m, ports)
		for _, p := range ports {
			want := "refused"
			if p == proto.BrokerPort {
				want = broker
			}
			if got[p] != want {
				t.Errorf("port %d: %q, want %q", p, got[p], want)
			}
		}
	}
	check("refused")
	l, err := m.Listen(proto.BrokerPort)
	if err != nil {
		t.Fatal(err)
	}
	heard := make(chan string, 1)
	go func() {
		c, err := l.Accept()
		if err != nil {
			heard <- err.Error()
			return
		}
		defer c.Close()
		b, err := io.ReadAll(c)
		heard <- fmt.Sprint(string(b), err)
	}()
	check("accepted")
	if got := <-heard; got != "hello<nil>" {
		t.Errorf("on the broker's port came %q", got)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	check("refused")
}

// bootDialer boots a machine whose first process is testdata/dialer.
func bootDialer(t *testing.T) vmm.Machine {
	t.Helper()
	image, err := testImage()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	image.Initramfs = withInit(t, image.Initramfs, dir)
	driver, err := testDriver(true)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := driver.Close(); err != nil {
			t.Error(err)
		}
	})
	ctx, cancel := context.WithTimeout(t.Context(), createLimit)
	defer cancel()
	m, err := driver.Boot(ctx, vmm.Spec{
		ID: fmt.Sprintf("%x", random(6)), Dir: t.TempDir(), Image: image, Shape: vmm.Shape{VCPUs: 1, MemoryMiB: memoryMiB},
		Launcher: &vmmtest.Launcher{},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	})
	return m
}

// withInit returns a copy of an initramfs in which the dialer is /init.
func withInit(t *testing.T, initramfs, dir string) string {
	t.Helper()
	program := filepath.Join(dir, "init")
	build := exec.CommandContext(t.Context(), "go", "build", "-buildvcs=false", "-o", program, "./testdata/dialer")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build the dialer: %v\n%s", err, out)
	}
	path, err := replaceInit(initramfs, program, dir)
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// replaceInit returns a copy of an initramfs in dir in which the program is /init. A kernel unpacks archives one after the
// other, so a file of a later one replaces that of an earlier.
func replaceInit(initramfs, program, dir string) (string, error) {
	code, err := os.ReadFile(program)
	if err != nil {
		return "", err
	}
	old, err := os.ReadFile(initramfs)
	if err != nil {
		return "", err
	}
	all := bytes.NewBuffer(old)
	all.Write(make([]byte, (4-len(old)%4)%4)) // archives begin at multiples of 4 bytes
	w := cpio.NewWriter(all)
	err = w.WriteHeader(&cpio.Header{Name: "init", Mode: cpio.TypeReg | 0o755, Size: int64(len(code))})
	if err == nil {
		_, err = w.Write(code)
	}
	if err = errors.Join(err, w.Close()); err != nil {
		return "", err
	}
	path := filepath.Join(dir, "initramfs")
	return path, os.WriteFile(path, all.Bytes(), 0o644)
}

// dialFrom lets the guest dial.
func dialFrom(t *testing.T, m vmm.Machine, ports []uint32) map[uint32]string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), createLimit)
	defer cancel()
	c, err := m.Dial(ctx, proto.AgentPort)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(commandLimit)); err != nil {
		t.Fatal(err)
	}
	got := make(map[uint32]string)
	if err := json.NewEncoder(c).Encode(ports); err != nil {
		t.Fatal(err)
	}
	if err := json.NewDecoder(c).Decode(&got); err != nil {
		t.Fatal(err)
	}
	return got
}
