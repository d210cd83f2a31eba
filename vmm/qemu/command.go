package qemu

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/ephemeral-run/ephemeral/guestagent/proto"
	"github.com/ephemeral-run/ephemeral/vmm"
)

// consoleLog is the file of the guest's console in the machine's directory.
const consoleLog = "console.log"

// command collects QEMU's command line and the descriptors it inherits.
type command struct {
	args   []string
	files  []*os.File
	byName bool // some of them are opened again, by name
}

func (c *command) add(args ...string) { c.args = append(c.args, args...) }

// inherit passes f on and returns the number it has in QEMU.
func (c *command) inherit(f *os.File) int {
	c.files = append(c.files, f)
	return 2 + len(c.files)
}

// escape protects commas in an option's value.
func escape(value string) string { return strings.ReplaceAll(value, ",", ",,") }

// boardArgs is what both a booted machine and its clones have: board, CPU, monitor, devices. Clones must have the same
// devices at the same places, so the PCI addresses are written out.
func (d *Driver) boardArgs(c *command, s vmm.Spec, monitor, line *os.File) {
	// The name lets an operator, and the removal of what an earlier life left, find the process of a machine.
	c.add(d.path, "-name", "ephemeral-"+s.ID)
	c.add("-nodefaults", "-no-user-config", "-display", "none")
	// No usb, vmport, smbus, sata, i8042: devices that a microVM does not need, each with its time at boot and its
	// bugs. (-M microvm would have none of them, but hangs now and then in timer calibration when emulated.)
	c.add("-M", "q35,usb=off,vmport=off,smbus=off,sata=off,i8042=off,memory-backend=ram")
	if d.kvm {
		c.add("-accel", "kvm", "-cpu", "host")
	} else {
		c.add("-accel", fmt.Sprintf("tcg,thread=multi,tb-size=%d", d.config.TBSize), "-cpu", "max")
	}
	c.add("-smp", fmt.Sprint(s.Shape.VCPUs), "-m", fmt.Sprintf("%dM", s.Shape.MemoryMiB))
	// A reset is the end of a machine, never a second life of it. Panics end it too, told apart by pvpanic.
	c.add("-no-reboot", "-action", "panic=exit-failure")
	// No sleep states: a guest that suspends itself would look alive and answer nothing.
	c.add("-global", "ICH9-LPC.disable_s3=1", "-global", "ICH9-LPC.disable_s4=1")
	// Denied: fork and exec, gaining privileges, changing priorities and affinities, and obsolete system calls.
	c.add("-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny")
	c.add("-chardev", fmt.Sprintf("socket,id=qmp,fd=%d", c.inherit(monitor)), "-mon", "chardev=qmp,mode=control")
	if d.config.Console {
		c.add("-chardev", "file,id=console,path="+escape(filepath.Join(s.Dir, consoleLog)), "-device", "isa-serial,chardev=console")
	}
	// file.locking=off: the file is shared by all machines and nobody writes to it.
	c.add("-drive", "id=root,if=none,format=raw,readonly=on,file.locking=off,file="+escape(s.Image.RootFS),
		"-device", "virtio-blk-pci,disable-legacy=on,addr=2,drive=root")
	c.add("-chardev", fmt.Sprintf("socket,id=line,fd=%d", c.inherit(line)),
		"-device", "virtio-serial-pci,disable-legacy=on,addr=3,id=serial,max_ports=2",
		"-device", "virtserialport,bus=serial.0,nr=1,chardev=line,name="+proto.SerialPort)
	// rng-builtin takes the host's randomness by system call; no device file in the jail.
	c.add("-object", "rng-builtin,id=rng", "-device", "virtio-rng-pci,disable-legacy=on,addr=4,rng=rng")
	c.add("-device", "pvpanic-pci,addr=5")
	if d.config.VMGenID {
		c.add("-device", "vmgenid,guid=auto")
	}
	if s.NIC != nil {
		d.nicArgs(c, *s.NIC)
	}
}

func (d *Driver) nicArgs(c *command, n vmm.NIC) {
	if n.File != nil {
		c.add("-netdev", fmt.Sprintf("tap,id=net,vhost=off,fd=%d", c.inherit(n.File)))
	} else {
		c.add("-netdev", "tap,id=net,vhost=off,script=no,downscript=no,ifname="+escape(n.Tap))
	}
	// romfile=: no network boot. guest_announce=off: clones tell nobody that they have moved.
	c.add("-device", "virtio-net-pci,disable-legacy=on,addr=6,netdev=net,romfile=,guest_announce=off,mac="+n.MAC.String())
}

// bootArgs makes the machine boot the image.
func (d *Driver) bootArgs(c *command, s vmm.Spec) {
	if s.RAM == "" {
		c.add("-object", fmt.Sprintf("memory-backend-ram,id=ram,merge=off,dump=off,size=%dM", s.Shape.MemoryMiB))
	} else {
		// share=on: the guest's memory is the file, and a snapshot need not write it.
		c.add("-object", fmt.Sprintf("memory-backend-file,id=ram,merge=off,dump=off,share=on,size=%dM,mem-path=%s", s.Shape.MemoryMiB, escape(s.RAM)))
	}
	c.add("-kernel", s.Image.Kernel, "-initrd", s.Image.Initramfs, "-append", d.kernelArgs())
}

// kernelArgs is the guest kernel's command line.
func (d *Driver) kernelArgs() string {
	args := []string{
		"panic=-1",            // a panic resets at once, and a reset ends the machine
		"random.trust_cpu=on", // do not wait for entropy; Prepare reseeds before anything untrusted runs
		"tsc=reliable",        // no clock watchdog: after a restore it would find the clock source at fault
		"no_timer_check",      // the timer's self-test fails on a busy host
		"cryptomgr.notests",   // no self-tests of ciphers at boot
		"8250.nr_uarts=1",     // look for one serial port, not for 32
		"net.ifnames=0",       // the network card is eth0
	}
	if !d.kvm {
		// Emulation is no security boundary to the host, and speculation does not exist in it; the mitigations only cost.
		args = append(args, "mitigations=off")
		// With its host busy, an emulated kernel measures its counter wrongly, ten times and more, and the clock of it and of
		// every clone runs away. This host knows better.
		if rate := counterRate(); rate > 0 {
			args = append(args, fmt.Sprintf("tsc_early_khz=%d", rate))
		}
	}
	if d.config.Console {
		args = append(args, "console=ttyS0")
	} else {
		args = append(args, "quiet", "loglevel=0") // messages to no console still cost time
	}
	return strings.Join(args, " ")
}

// restoreArgs makes the machine wait for a template's state. Its memory is the template's, mapped privately: share=off.
func (d *Driver) restoreArgs(c *command, s vmm.Spec, memory, optionROM string) {
	backend := fmt.Sprintf("memory-backend-file,id=ram,merge=off,dump=off,share=off,size=%dM,mem-path=%s", s.Shape.MemoryMiB, escape(memory))
	if d.release.atLeast(8, 2) {
		backend += ",readonly=on,rom=off" // open the file read-only although the guest writes to its private copy
	}
	c.add("-object", backend)
	// The option ROM through which the kernel was booted is part of the state, and so has to be there. The kernel and the
	// initramfs are in the guest's memory since long: leaving them out saves each clone a copy of both.
	c.add("-option-rom", optionROM)
	// Paused when loaded. With defer the capabilities can be set before the state arrives.
	c.add("-S", "-incoming", "defer")
}

// launchable is the command for the launcher, with all it needs to see of the host.
func (d *Driver) launchable(c *command, s vmm.Spec, readOnly, writable []string) vmm.Command {
	l := vmm.Command{
		Args:     c.args,
		Files:    c.files,
		ReadOnly: slices.Concat([]string{d.path}, d.data, readOnly),
		Writable: slices.Concat([]string{s.Dir}, writable),
		Proc:     c.byName,
	}
	if d.kvm {
		l.Devices = append(l.Devices, "/dev/kvm")
	}
	if s.NIC != nil && s.NIC.File == nil {
		l.Devices = append(l.Devices, "/dev/net/tun")
	}
	return l
}

// optionROM is the ROM that QEMU adds to boot the kernel: one for bzImage, one for ELF kernels with a PVH entry.
func optionROM(kernel string) (string, error) {
	f, err := os.Open(kernel)
	if err != nil {
		return "", fmt.Errorf("read kernel: %w", err)
	}
	defer func() { _ = f.Close() }()
	var magic [4]byte
	if _, err := io.ReadFull(f, magic[:]); err != nil {
		return "", fmt.Errorf("read kernel %s: %w", kernel, err)
	}
	if string(magic[:]) == "\x7fELF" {
		return "pvh.bin", nil
	}
	return "linuxboot_dma.bin", nil
}
