package vmmtest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ephemeral-run/ephemeral/vmm"
)

// BareCloudHypervisor runs Cloud Hypervisor by a command line as a person would write it, with no code of a driver, to
// compare speeds with. It restores templates of the driver.
type BareCloudHypervisor struct {
	Program string
	NIC     *vmm.NIC // with File; nil: none, as the template must have been made
}

// Restore makes a clone of a template, running at once, and ends it again. Times begin with the start of the process.
func (b BareCloudHypervisor) Restore(ctx context.Context, t vmm.Template) (times Times, err error) {
	dir, err := os.MkdirTemp("", "bare-")
	if err != nil {
		return times, fmt.Errorf("bare restore: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	if err := b.writeClone(dir, t); err != nil {
		return times, fmt.Errorf("bare restore: %w", err)
	}
	restore := "source_url=file://" + dir + ",resume=true"
	var files []*os.File
	if b.NIC != nil {
		restore += ",net_fds=[net@[3]]"
		files = append(files, b.NIC.File)
	}
	begin := time.Now()
	ctx, _, end, err := launchBare(ctx, []string{b.Program, "--api-socket", "path=" + filepath.Join(dir, "api"), "--restore", restore}, files)
	if err != nil {
		return times, fmt.Errorf("bare restore: %w", err)
	}
	defer func() {
		if err = end(err); err != nil {
			err = fmt.Errorf("bare restore: %w", err)
		}
	}()
	agent := NewAgent(func(ctx context.Context, port uint32) (net.Conn, error) {
		return dialHybrid(ctx, filepath.Join(dir, "vsock"), port)
	})
	return timeAgent(ctx, agent, begin, func(context.Context) error { return nil })
}

// writeClone makes the directory to restore from.
func (b BareCloudHypervisor) writeClone(dir string, t vmm.Template) error {
	content, err := os.ReadFile(filepath.Join(t.Dir, "config.json"))
	if err != nil {
		return err
	}
	var config map[string]any
	if err := json.Unmarshal(content, &config); err != nil {
		return err
	}
	zone, err := only(config, "memory", "zones")
	if err != nil {
		return err
	}
	zone["file"], zone["shared"] = t.RAM, false
	config["vsock"].(map[string]any)["socket"] = filepath.Join(dir, "vsock")
	delete(config["payload"].(map[string]any), "initramfs")
	delete(config, "landlock_rules")
	config["landlock_enable"] = false
	if b.NIC != nil {
		card, err := only(config, "net")
		if err != nil {
			return err
		}
		delete(card, "tap")
		delete(card, "host_mac")
		card["fds"] = []int{-1}
	}
	if content, err = json.Marshal(config); err != nil {
		return err
	}
	return errors.Join(os.WriteFile(filepath.Join(dir, "config.json"), content, 0o600),
		os.Symlink(filepath.Join(t.Dir, "state.json"), filepath.Join(dir, "state.json")))
}

// only follows names to the one element of a list.
func only(in map[string]any, path ...string) (map[string]any, error) {
	for _, name := range path[:len(path)-1] {
		in, _ = in[name].(map[string]any)
	}
	list, _ := in[path[len(path)-1]].([]any)
	if len(list) != 1 {
		return nil, fmt.Errorf("configuration: %s has %d elements", strings.Join(path, "."), len(list))
	}
	element, ok := list[0].(map[string]any)
	if !ok {
		return nil, fmt.Errorf("configuration: %s has no object", strings.Join(path, "."))
	}
	return element, nil
}

// dialHybrid connects to a port of a guest through the socket of its vsock, as often as it takes.
func dialHybrid(ctx context.Context, socket string, port uint32) (net.Conn, error) {
	for {
		conn, err := connectHybrid(ctx, socket, port)
		if err == nil {
			return conn, nil
		}
		retry := errors.Is(err, io.EOF) || errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ECONNREFUSED) || errors.Is(err, os.ErrDeadlineExceeded)
		if !retry {
			return nil, err
		}
		select {
		case <-time.After(time.Millisecond):
		case <-ctx.Done():
			return nil, errors.Join(context.Cause(ctx), err)
		}
	}
}

func connectHybrid(ctx context.Context, socket string, port uint32) (_ net.Conn, err error) {
	conn, err := new(net.Dialer).DialContext(ctx, "unix", socket)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			_ = conn.Close()
		}
	}()
	if err := conn.SetDeadline(time.Now().Add(2 * time.Second)); err != nil {
		return nil, err
	}
	if _, err := fmt.Fprintf(conn, "CONNECT %d\n", port); err != nil {
		return nil, err
	}
	var line []byte
	for one := make([]byte, 1); ; line = append(line, one[0]) {
		if _, err := io.ReadFull(conn, one); err != nil {
			return nil, err
		}
		if one[0] == '\n' {
			break
		}
	}
	if !strings.HasPrefix(string(line), "OK ") {
		return nil, fmt.Errorf("answer to CONNECT: %.40q", line)
	}
	return conn, conn.SetDeadline(time.Time{})
}
