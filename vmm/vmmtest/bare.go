package vmmtest

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ephemeral-run/ephemeral/guestagent/proto"
	"github.com/ephemeral-run/ephemeral/guestagent/proto/mux"
	"github.com/ephemeral-run/ephemeral/images"
	"github.com/ephemeral-run/ephemeral/vmm"
)

// Bare runs QEMU by a command line as a person would write it, with no code of a driver, to compare speeds with. It has
// the devices that the QEMU driver's templates have, and can restore those.
type Bare struct {
	QEMU   string // program
	KVM    bool   // else emulation
	TBSize int    // MiB of translated code; emulation only
	Image  images.Image
	Shape  vmm.Shape
	NIC    *vmm.NIC // with File; nil: none, as the template must have been made
	// Private opens a template's memory read-only, which QEMU can from 8.2 on and has to where root may not write to it.
	Private bool
	// Started is told of the process at once; nil: nobody is.
	Started func(pid int) error
	// Watch looks at the process once the agent has run a command; nil: nobody does.
	Watch func(pid int) error
}

// ColdBoot boots the image.
func (b Bare) ColdBoot(ctx context.Context) (Times, error) {
	times, err := b.run(ctx, nil, "", []string{
		"-object", fmt.Sprintf("memory-backend-ram,id=ram,merge=off,dump=off,size=%dM", b.Shape.MemoryMiB),
		"-kernel", b.Image.Kernel, "-initrd", b.Image.Initramfs, "-append", b.kernelArgs(),
	})
	if err != nil {
		return times, fmt.Errorf("bare cold boot: %w", err)
	}
	return times, nil
}

func (b Bare) kernelArgs() string {
	args := "panic=-1 random.trust_cpu=on tsc=reliable no_timer_check cryptomgr.notests 8250.nr_uarts=1 net.ifnames=0 quiet loglevel=0"
	if !b.KVM {
		args += " mitigations=off"
	}
	return args
}

// Restore makes a clone of a template, running at once, and ends it again.
func (b Bare) Restore(ctx context.Context, t vmm.Template) (Times, error) {
	state, err := os.Open(filepath.Join(t.Dir, "state"))
	if err != nil {
		return Times{}, fmt.Errorf("bare restore: %w", err)
	}
	defer func() { _ = state.Close() }()
	memory := fmt.Sprintf("memory-backend-file,id=ram,merge=off,dump=off,share=off,size=%dM,mem-path=%s", b.Shape.MemoryMiB, t.RAM)
	if b.Private {
		memory += ",readonly=on,rom=off"
	}
	// Commands at once, since QEMU works through them in order, but for the last: the clone of a paused machine is paused.
	const script = `{"execute":"qmp_capabilities"}
{"execute":"migrate-set-capabilities","arguments":{"capabilities":[{"capability":"x-ignore-shared","state":true},{"capability":"events","state":true}]}}
{"execute":"migrate-set-parameters","arguments":{"announce-rounds":0}}
{"execute":"migrate-incoming","arguments":{"uri":"fd:5"}}
`
	times, err := b.run(ctx, state, script, []string{"-object", memory, "-option-rom", "linuxboot_dma.bin", "-incoming", "defer"})
	if err != nil {
		return times, fmt.Errorf("bare restore: %w", err)
	}
	return times, nil
}

func (b Bare) args(extra []string) []string {
	accel := []string{"-accel", fmt.Sprintf("tcg,thread=multi,tb-size=%d", b.TBSize), "-cpu", "max"}
	if b.KVM {
		accel = []string{"-accel", "kvm", "-cpu", "host"}
	}
	args := append([]string{
		b.QEMU, "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
		"-M", "q35,usb=off,vmport=off,smbus=off,sata=off,i8042=off,memory-backend=ram",
		"-smp", fmt.Sprint(b.Shape.VCPUs), "-m", fmt.Sprintf("%dM", b.Shape.MemoryMiB),
		"-chardev", "socket,id=qmp,fd=3", "-mon", "chardev=qmp,mode=control",
		"-drive", "id=root,if=none,format=raw,readonly=on,file.locking=off,file=" + b.Image.RootFS,
		"-device", "virtio-blk-pci,disable-legacy=on,addr=2,drive=root",
		"-chardev", "socket,id=line,fd=4", "-device", "virtio-serial-pci,disable-legacy=on,addr=3,id=serial,max_ports=2",
		"-device", "virtserialport,bus=serial.0,nr=1,chardev=line,name=" + proto.SerialPort,
		"-object", "rng-builtin,id=rng", "-device", "virtio-rng-pci,disable-legacy=on,addr=4,rng=rng",
		"-device", "pvpanic-pci,addr=5", "-device", "vmgenid,guid=auto",
	}, accel...)
	if b.NIC != nil {
		args = append(args, "-netdev", "tap,id=net,vhost=off,fd=6",
			"-device", "virtio-net-pci,disable-legacy=on,addr=6,netdev=net,romfile=,guest_announce=off,mac="+b.NIC.MAC.String())
	}
	return append(args, extra...)
}

// run starts QEMU, sends the monitor its commands, and measures. The process ends before it returns.
func (b Bare) run(ctx context.Context, state *os.File, commands string, extra []string) (times Times, err error) {
	monitor, monitorGuest, err := pair()
	if err != nil {
		return times, err
	}
	defer func() { _ = monitor.Close() }()
	line, lineGuest, err := pair()
	if err != nil {
		_ = monitorGuest.Close()
		return times, err
	}
	defer func() { _ = line.Close() }()
	if state == nil { // a place holder, so that the numbers are the same
		state = monitorGuest
	}
	files := []*os.File{monitorGuest, lineGuest, state}
	if b.NIC != nil {
		files = append(files, b.NIC.File)
	}
	begin := time.Now()
	ctx, pid, end, err := launchBare(ctx, b.args(extra), files)
	_ = monitorGuest.Close()
	_ = lineGuest.Close()
	if err != nil {
		return times, err
	}
	defer func() { err = end(err) }()
	if b.Started != nil {
		if err := b.Started(pid); err != nil {
			return times, err
		}
	}
	stop := context.AfterFunc(ctx, func() { _ = monitor.Close() })
	defer stop()
	if commands != "" {
		if err := load(monitor, commands); err != nil {
			return times, err
		}
	}
	times, err = b.measure(ctx, line, begin)
	if err == nil && b.Watch != nil {
		err = b.Watch(pid)
	}
	return times, err
}

// launchBare starts a program whose end is the end of the context it returns. end kills it, waits, and adds its last words
// to an error.
func launchBare(ctx context.Context, args []string, files []*os.File) (_ context.Context, pid int, end func(error) error, err error) {
	var words lastWords
	process, err := new(Launcher).Launch(ctx, vmm.Command{Args: args, Files: files, Stderr: &words})
	if err != nil {
		return nil, 0, nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	go func() {
		select {
		case <-process.Done():
			cancel()
		case <-ctx.Done():
		}
	}()
	return ctx, process.Pid(), func(err error) error {
		cancel()
		err = errors.Join(err, process.Kill())
		<-process.Done()
		if err != nil {
			err = fmt.Errorf("%w: %s", err, words.text)
		}
		return err
	}, nil
}

// load has QEMU load a template and run it.
func load(monitor net.Conn, commands string) error {
	if _, err := io.WriteString(monitor, commands); err != nil {
		return err
	}
	lines := bufio.NewScanner(monitor)
	for lines.Scan() {
		switch line := lines.Text(); {
		case strings.Contains(line, `"error"`), strings.Contains(line, `"failed"`):
			return fmt.Errorf("monitor: %s", line)
		case strings.Contains(line, `"completed"`):
			_, err := io.WriteString(monitor, `{"execute":"cont"}`+"\n")
			return err
		}
	}
	return errors.Join(errors.New("the monitor ended"), lines.Err())
}

// measure talks to the agent.
func (b Bare) measure(ctx context.Context, line net.Conn, begin time.Time) (times Times, err error) {
	session, err := mux.Host(ctx, line)
	if err != nil {
		return times, err
	}
	defer func() { _ = session.Close() }()
	agent := NewAgent(func(ctx context.Context, port uint32) (net.Conn, error) {
		for {
			conn, err := session.Dial(ctx, port)
			if !errors.Is(err, mux.ErrRefused) {
				return conn, err
			}
			select {
			case <-time.After(time.Millisecond):
			case <-ctx.Done():
				return nil, context.Cause(ctx)
			}
		}
	})
	return timeAgent(ctx, agent, begin, func(context.Context) error { return nil })
}

// pair makes a connection with one end to be inherited.
func pair() (net.Conn, *os.File, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("socket pair: %w", err)
	}
	host := os.NewFile(uintptr(fds[0]), "host")
	conn, err := net.FileConn(host)
	_ = host.Close()
	guest := os.NewFile(uintptr(fds[1]), "guest")
	if err != nil {
		_ = guest.Close()
		return nil, nil, fmt.Errorf("socket pair: %w", err)
	}
	return conn, guest, nil
}

// lastWords keeps a little of what a process writes. It is read after the process has ended.
type lastWords struct{ text []byte }

// Write never fails.
func (w *lastWords) Write(p []byte) (int, error) {
	if room := 2048 - len(w.text); room > 0 {
		w.text = append(w.text, p[:min(room, len(p))]...)
	}
	return len(p), nil
}
