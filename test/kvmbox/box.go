package kvmbox

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/gofrs/flock"

	"github.com/ephemeral-run/ephemeral/images"
	"github.com/ephemeral-run/ephemeral/node/guest"
	"github.com/ephemeral-run/ephemeral/vmm"
	"github.com/ephemeral-run/ephemeral/vmm/qemu"
	"github.com/ephemeral-run/ephemeral/vmm/vmmtest"
)

const (
	// bootLimit bounds the boot of a box, which takes some seconds on an idle host.
	bootLimit = 3 * time.Minute
	// translated is what the emulator keeps of translated code, in MiB. The box runs the code of a kernel, hypervisors
	// and their guests.
	translated = 1024
	// outputLimit of a command, in bytes of each stream.
	outputLimit = 1 << 30
	// carried is where the box has what came along.
	carried = "/carry"
)

// box is a running box.
type box struct {
	driver  *qemu.Driver
	machine vmm.Machine
	client  *guest.Client
	dir     string
	unlock  func() error
	// hangLimit is how long an answer may take before the box counts as hung.
	hangLimit time.Duration

	closing sync.Once
	closed  error
}

// openBox builds what is missing and boots a box.
func openBox(ctx context.Context, o Options) (_ Place, err error) {
	if err := os.MkdirAll(o.Dir, 0o755); err != nil {
		return nil, fmt.Errorf("make directory of boxes: %w", err)
	}
	b := &box{hangLimit: hangLimit}
	defer func() {
		if err != nil {
			err = errors.Join(err, b.Close())
		}
	}()
	if b.unlock, err = lock(ctx, o); err != nil {
		return nil, err
	}
	image, err := buildImage(ctx, o.Dir, o.Root, o.Progress)
	if err != nil {
		return nil, fmt.Errorf("build the box's image: %w", err)
	}
	if b.dir, err = os.MkdirTemp(o.Dir, runPrefix); err != nil {
		return nil, err
	}
	files := filepath.Join(b.dir, "carry.erofs")
	o.Progress("packing what is carried")
	if err := pack(ctx, o.Carry, b.dir, files); err != nil {
		return nil, err
	}
	if err := b.boot(ctx, image, files, o); err != nil {
		return nil, err
	}
	return b, nil
}

// runPrefix begins the name of the directory of a box that runs.
const runPrefix = "run-"

// lock waits until no other box runs and removes what one left that was killed.
func lock(ctx context.Context, o Options) (func() error, error) {
	l := flock.New(filepath.Join(o.Dir, ".box"))
	got, err := l.TryLock()
	if err == nil && !got {
		o.Progress("waiting for another box to end")
		_, err = l.TryLockContext(ctx, 200*time.Millisecond)
	}
	if err != nil {
		return nil, fmt.Errorf("wait for the box: %w", err)
	}
	left, err := filepath.Glob(filepath.Join(o.Dir, runPrefix+"*"))
	for _, dir := range left {
		err = errors.Join(err, os.RemoveAll(dir))
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("remove what an interrupted box left: %w", err), l.Close())
	}
	return l.Close, nil
}

// boot starts the box and makes it ready for commands.
func (b *box) boot(ctx context.Context, image images.Image, files string, o Options) (err error) {
	began := time.Now()
	// The console tells how a box died; it costs some of its boot.
	config := qemu.Config{Path: os.Getenv("EPHEMERAL_QEMU"), Accel: "tcg", TBSize: translated, Console: true}
	if config.Path == "" {
		config.Path = "qemu-system-x86_64"
	}
	if b.driver, err = qemu.New(config); err != nil {
		return err
	}
	var id [6]byte
	if _, err := rand.Read(id[:]); err != nil {
		return err
	}
	o.Progress("booting a box: " + b.driver.Version())
	ctx, cancel := context.WithTimeout(ctx, bootLimit)
	defer cancel()
	b.machine, err = b.driver.Boot(ctx, vmm.Spec{
		ID: hex.EncodeToString(id[:]), Dir: b.dir, Image: image,
		// One processor: with two, the emulated one's kernel crashes after some hundred guests.
		Shape:    vmm.Shape{VCPUs: 1, MemoryMiB: o.MemoryMiB},
		Launcher: &launcher{files: files},
	})
	if err != nil {
		return fmt.Errorf("boot the box: %w", err)
	}
	b.client = guest.Connect(b.machine.Dial)
	if err := b.client.Ping(ctx); err != nil {
		return b.explain(fmt.Errorf("boot the box: %w", err))
	}
	var said bytes.Buffer
	code, err := b.Run(ctx, Command{Args: []string{"sh", "-euc", setup}, Stdout: &said, Stderr: &said})
	if err != nil {
		return err
	}
	if code != 0 {
		return b.explain(fmt.Errorf("set the box up: exit code %d: %s", code, said.Bytes()))
	}
	o.Progress(fmt.Sprintf("the box is up after %.1f s: %s", time.Since(began).Seconds(), strings.TrimSpace(said.String())))
	return nil
}

// setup mounts what is carried, with memory over it to write to, and gives devices the modes that udev would. It uncovers the
// kernel's own boot id, which the agent covers in every machine: while a part of /proc is covered, the kernel lets no user
// namespace have a /proc of its own, as jails do.
const setup = `
mkdir -p /run/carry/files /run/carry/over ` + carried + `
mount -t erofs -o ro /dev/vdb /run/carry/files
mount -t tmpfs -o mode=0755,size=25% none /run/carry/over
mkdir /run/carry/over/upper /run/carry/over/work
mount -t overlay -o lowerdir=/run/carry/files,upperdir=/run/carry/over/upper,workdir=/run/carry/over/work none ` + carried + `
getent group kvm >/dev/null || groupadd --system kvm
chgrp kvm /dev/kvm
chmod 660 /dev/kvm
chmod 666 /dev/net/tun
umount /proc/sys/kernel/random/boot_id
echo "Linux $(uname -r), $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo)"
`

// launcher starts a box's hypervisor with what its driver does not know of.
type launcher struct {
	vmmtest.Launcher
	files string // disk of what is carried
}

func (l *launcher) Launch(ctx context.Context, c vmm.Command) (vmm.Process, error) {
	c.Args = append(c.Args,
		"-drive", "id=carry,if=none,format=raw,readonly=on,file.locking=off,file="+strings.ReplaceAll(l.files, ",", ",,"),
		"-device", "virtio-blk-pci,disable-legacy=on,addr=7,drive=carry")
	return l.Launcher.Launch(ctx, c)
}

func (b *box) Describe() string        { return "a box with emulated KVM" }
func (b *box) Boxed() bool             { return true }
func (b *box) Path(name string) string { return carried + "/" + name }

func (b *box) Run(ctx context.Context, c Command) (int, error) {
	if c.Dir == "" {
		c.Dir = "/"
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	go b.watch(ctx, cancel)
	exit, err := b.client.Exec(ctx, guest.Command{
		Args: c.Args, Env: append([]string{"HOME=/root", "TMPDIR=/tmp"}, c.Env...), Cwd: c.Dir, User: "root", Warming: true, OutputLimit: outputLimit,
	}, c.Stdout, c.Stderr)
	if err != nil && errors.Is(context.Cause(ctx), ErrHung) {
		return 0, b.explain(fmt.Errorf("run %s in the box: %w", c.Args[0], context.Cause(ctx)))
	}
	if err != nil && ctx.Err() != nil {
		return 0, fmt.Errorf("run %s in the box: %w", c.Args[0], err) // not the box's doing
	}
	if err != nil {
		return 0, b.explain(fmt.Errorf("run %s in the box: %w", c.Args[0], err))
	}
	if exit.Outcome != "exited" && exit.Outcome != "signalled" {
		return 0, b.explain(fmt.Errorf("run %s in the box: %s: %s", c.Args[0], exit.Outcome, exit.Detail))
	}
	return exit.Code, nil
}

// ErrHung: the box does not answer any more.
var ErrHung = errors.New("the box hangs")

const (
	// hangCheck is the time between two questions whether a box lives. Each question is an interrupt as well, and that is
	// why it is short: QEMU's VMRUN notes a virtual interrupt in the same word of bits as its other threads note the
	// interrupts of devices, without their lock, so that now and then one of those is lost. Was it the timer's, and the box
	// has nothing to do before the next one, it sleeps for good; the APIC holds the lost interrupt, though, and
	// delivers it with the next one, whatever that is of.
	hangCheck = time.Second
	// hangLimit is long: on a busy host a box with many machines takes its time.
	hangLimit = 2 * time.Minute
)

// watch asks the box whether it lives until ctx ends, and cancels with ErrHung when it does not.
func (b *box) watch(ctx context.Context, cancel context.CancelCauseFunc) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(hangCheck):
		}
		asked, done := context.WithTimeout(ctx, b.hangLimit)
		err := b.client.Ping(asked)
		late := asked.Err() != nil && ctx.Err() == nil
		done()
		if late {
			cancel(fmt.Errorf("%w: no answer in %v: %w", ErrHung, b.hangLimit, err))
			return
		}
	}
}

func (b *box) ReadFile(ctx context.Context, path string, limit int64) ([]byte, error) {
	var content, said bytes.Buffer
	code, err := b.Run(ctx, Command{
		Args: []string{"head", "-c", fmt.Sprint(limit + 1), "--", path}, Stdout: &content, Stderr: &said,
	})
	switch {
	case err != nil:
		return nil, err
	case code != 0:
		return nil, errors.New(strings.TrimSpace(said.String()))
	case int64(content.Len()) > limit:
		return nil, fmt.Errorf("%s is longer than %d bytes", path, limit)
	}
	return content.Bytes(), nil
}

// lastWords are the bytes of a box's console that an error has.
const lastWords = 4 << 10

// explain adds what the console last said to an error.
func (b *box) explain(err error) error {
	select {
	case <-b.machine.Done():
		err = errors.Join(err, b.machine.Err())
	default:
	}
	f, ferr := os.Open(filepath.Join(b.dir, "console.log"))
	if ferr != nil {
		return err
	}
	defer f.Close()
	if info, ferr := f.Stat(); ferr == nil && info.Size() > lastWords {
		_, _ = f.Seek(-lastWords, io.SeekEnd)
	}
	if words, ferr := io.ReadAll(io.LimitReader(f, lastWords)); ferr == nil && len(words) > 0 {
		err = fmt.Errorf("%w\nthe box's console said last:\n%s", err, strings.ToValidUTF8(string(words), "?"))
	}
	return err
}

func (b *box) Close() error {
	b.closing.Do(func() {
		var errs []error
		if b.machine != nil {
			errs = append(errs, b.machine.Close())
		}
		if b.driver != nil {
			errs = append(errs, b.driver.Close())
		}
		if b.dir != "" {
			errs = append(errs, os.RemoveAll(b.dir))
		}
		if b.unlock != nil {
			errs = append(errs, b.unlock())
		}
		b.closed = errors.Join(errs...)
	})
	return b.closed
}
