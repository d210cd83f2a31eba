// Command hostile is what a taken-over VMM might do. It runs in the jail in the VMM's place, tries to get out, and prints
// what came of each attempt, as JSON: the empty string for success, else the error.
package main

import (
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// target says what there is on the host to attack.
type target struct {
	Pid      int    // a process of the host
	File     string // a file of the host that everybody may read
	Neighbor string // a file of another machine
	Own      string // the machine's writable directory
	ReadOnly string // a file given read-only
	TCP      string // address of a listener on the host
	Abstract string // name of an abstract unix socket on the host
	Tap      string // name of the machine's tap
}

func main() {
	if len(os.Args) == 2 {
		switch os.Args[1] {
		case "memory":
			eat()
		case "fork":
			fork()
		case "flood":
			flood()
		case "sleep":
			time.Sleep(time.Hour)
		case "child": // of fork
			time.Sleep(time.Hour)
		}
		os.Exit(3)
	}
	var t target
	if err := json.NewDecoder(os.NewFile(3, "target")).Decode(&t); err != nil {
		fmt.Println(err)
		os.Exit(2)
	}
	results := map[string]string{}
	for name, attempt := range attempts(t) {
		results[name] = ""
		if err := attempt(); err != nil {
			results[name] = err.Error()
		}
	}
	if err := json.NewEncoder(os.Stdout).Encode(results); err != nil {
		os.Exit(2)
	}
}

func attempts(t target) map[string]func() error {
	a := map[string]func() error{
		"write own directory": func() error { return os.WriteFile(t.Own+"/file", []byte("x"), 0o600) },
		"read read-only file": read(t.ReadOnly),
		"read null device":    func() error { _, err := os.ReadFile("/dev/null"); return err },

		"write read-only file":   write(t.ReadOnly),
		"chmod read-only file":   func() error { return os.Chmod(t.ReadOnly, 0o666) },
		"read host file":         read(t.File),
		"read neighbour":         read(t.Neighbor),
		"write root":             write("/file"),
		"write library":          write("/usr/lib/x86_64-linux-gnu/file"),
		"write device directory": write("/dev/file"),
		"make directory":         func() error { return os.Mkdir("/tmp", 0o777) },
		"remount root":           func() error { return unix.Mount("", "/", "", unix.MS_REMOUNT|unix.MS_BIND, "") },
		"mount proc":             func() error { return unix.Mount("proc", t.Own, "proc", 0, "") },
		"open by handle": func() error {
			handle := unix.NewFileHandle(1, make([]byte, 8))
			_, err := unix.OpenByHandleAt(unix.AT_FDCWD, handle, unix.O_RDONLY)
			return err
		},
		"open tree":   func() error { _, err := unix.OpenTree(unix.AT_FDCWD, "/", 1); return err },
		"chroot":      func() error { return unix.Chroot(t.Own) },
		"make device": func() error { return unix.Mknod(t.Own+"/mem", unix.S_IFCHR|0o666, int(unix.Mkdev(1, 1))) },

		"write core pattern":     write("/proc/sys/kernel/core_pattern"),
		"write host name":        write("/proc/sys/kernel/hostname"),
		"forward packets":        write("/proc/sys/net/ipv4/ip_forward"),
		"trigger system request": write("/proc/sysrq-trigger"),
		"read kernel memory":     read("/proc/kcore"),
		"escape the OOM killer":  func() error { return os.WriteFile("/proc/self/oom_score_adj", []byte("-1000"), 0) },
		"see host process":       func() error { _, err := os.Stat("/proc/" + strconv.Itoa(t.Pid)); return err },
		"leave by root link":     read("/proc/1/root/etc/passwd"),
		"leave by program link":  write("/proc/self/exe"),

		"signal host process":     func() error { return unix.Kill(t.Pid, 0) },
		"signal parent":           func() error { return zeroPid(unix.Getppid()) },
		"trace host process":      func() error { return unix.PtraceAttach(t.Pid) },
		"read host memory":        readMemory(t.Pid),
		"open host process":       func() error { _, err := unix.PidfdOpen(t.Pid, 0); return err },
		"raise priority":          func() error { return unix.Setpriority(unix.PRIO_PROCESS, 0, -10) },
		"raise open files":        func() error { return unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 1 << 20, Max: 1 << 20}) },
		"dump core":               func() error { return unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{Cur: 1 << 20, Max: 1 << 20}) },
		"open 2000 files":         openMany,
		"become root":             func() error { return syscall.Setuid(0) },
		"become root's group":     func() error { return syscall.Setgid(0) },
		"drop groups":             func() error { return syscall.Setgroups([]int{0}) },
		"new user namespace":      func() error { return unix.Unshare(unix.CLONE_NEWUSER) },
		"clone user namespace":    clone(syscall.CLONE_NEWUSER),
		"clone network namespace": clone(syscall.CLONE_NEWUSER | syscall.CLONE_NEWNET),
		"enter namespace":         func() error { return unix.Setns(0, 0) },
		"clone3":                  call(unix.SYS_CLONE3, 0, 0),

		"load program into kernel": call(unix.SYS_BPF, 0, 0),
		"io_uring":                 call(unix.SYS_IO_URING_SETUP, 8, 0),
		"userfaultfd":              call(unix.SYS_USERFAULTFD, 0, 0),
		"performance events":       call(unix.SYS_PERF_EVENT_OPEN, 0, 0),
		"key ring":                 call(unix.SYS_KEYCTL, 0, 0),
		"kernel log":               func() error { _, err := unix.Klogctl(3, make([]byte, 100)); return err },
		"load module":              func() error { return unix.FinitModule(0, "", 0) },
		"set clock":                func() error { return unix.Settimeofday(&unix.Timeval{Sec: 1}) },
		"set host name":            func() error { return unix.Sethostname([]byte("x")) },
		"reboot":                   func() error { return unix.Reboot(unix.LINUX_REBOOT_CMD_CAD_OFF) },

		"connect to host":         dial("tcp", t.TCP),
		"connect to metadata":     dial("tcp", "169.254.169.254:80"),
		"connect to internet":     dial("tcp", "192.0.2.1:443"),
		"connect over IPv6":       dial("tcp", "[2001:db8::1]:443"),
		"send datagram":           send("192.0.2.1:53"),
		"send to loopback":        send("127.0.0.1:53"),
		"connect abstract socket": dial("unix", "@"+t.Abstract),
		"listen on host":          func() error { return reachable() },
		"raw socket":              socket(unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_ICMP),
		"packet socket":           socket(unix.AF_PACKET, unix.SOCK_RAW, 0),
		"vsock":                   socket(unix.AF_VSOCK, unix.SOCK_STREAM, 0),
		"netlink":                 socket(unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_ROUTE),
		"bring loopback up":       interfaceUp("lo"),
		"take tap down":           interfaceDown(t.Tap),
	}
	for _, path := range []string{
		"/etc/passwd", "/etc/shadow", "/etc/hostname", "/root", "/home", "/proc/self/status", "/proc/1/environ",
		"/proc/sys/kernel/core_pattern", "/sys/kernel", "/sys/fs/cgroup", "/run", "/var/lib", "/opt", "/bin/sh", "/usr/bin",
		"/usr/share", "/dev/mem", "/dev/kmem", "/dev/kvm", "/dev/net/tun", "/dev/vda", "/dev/sda", "/dev/vhost-net",
		"/dev/shm", "/dev/tty", "/dev/fuse", "/dev/loop-control",
	} {
		a["open "+path] = func() error { _, err := os.Stat(path); return err }
	}
	return a
}

func read(path string) func() error {
	return func() error { _, err := os.ReadFile(path); return err }
}

func write(path string) func() error {
	return func() error { return os.WriteFile(path, []byte("x"), 0o666) }
}

// zeroPid says that there is no such process as number 0.
func zeroPid(pid int) error {
	if pid == 0 {
		return unix.ESRCH
	}
	return unix.Kill(pid, 0)
}

func readMemory(pid int) func() error {
	return func() error {
		b := make([]byte, 8)
		local := []unix.Iovec{{Base: &b[0], Len: 8}}
		_, err := unix.ProcessVMReadv(pid, local, []unix.RemoteIovec{{Base: 0x400000, Len: 8}}, 0)
		return err
	}
}

func openMany() error {
	var files []*os.File
	defer func() {
		for _, f := range files {
			_ = f.Close()
		}
	}()
	for range 2000 {
		f, err := os.Open("/dev/null")
		if err != nil {
			return err
		}
		files = append(files, f)
	}
	return nil
}

func clone(flags uintptr) func() error {
	return func() error {
		cmd := exec.Command(os.Args[0], "none")
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: flags}
		err := cmd.Run()
		if exit, ok := err.(*exec.ExitError); ok && exit.ExitCode() == 3 {
			return nil // it ran
		}
		return err
	}
}

func call(number, a, b uintptr) func() error {
	return func() error {
		if _, _, errno := unix.Syscall(number, a, b, 0); errno != 0 {
			return errno
		}
		return nil
	}
}

func dial(network, address string) func() error {
	return func() error {
		c, err := net.DialTimeout(network, address, time.Second)
		if err == nil {
			err = c.Close()
		}
		return err
	}
}

func send(address string) func() error {
	return func() error {
		c, err := net.Dial("udp", address)
		if err != nil {
			return err
		}
		defer c.Close()
		_, err = c.Write([]byte("x"))
		return err
	}
}

// reachable listens and connects to itself: with loopback down even that must fail.
func reachable() error {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	defer l.Close()
	return dial("tcp", l.Addr().String())()
}

func socket(family, kind, protocol int) func() error {
	return func() error {
		fd, err := unix.Socket(family, kind, protocol)
		if err == nil {
			err = unix.Close(fd)
		}
		return err
	}
}

func interfaceUp(name string) func() error   { return interfaceFlags(name, unix.IFF_UP) }
func interfaceDown(name string) func() error { return interfaceFlags(name, 0) }

func interfaceFlags(name string, flags uint16) func() error {
	return func() error {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		request, err := unix.NewIfreq(name)
		if err != nil {
			return err
		}
		request.SetUint16(flags)
		return unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, request)
	}
}

// eat takes memory until it is killed.
func eat() {
	for {
		b, err := unix.Mmap(-1, 0, 16<<20, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
		if err != nil {
			os.Exit(4)
		}
		for i := 0; i < len(b); i += 4096 {
			b[i] = 1
		}
	}
}

// fork starts children until it may not, says how many there are, and stays.
func fork() {
	n := 0
	for ; n < 10000; n++ {
		cmd := exec.Command(os.Args[0], "child")
		if err := cmd.Start(); err != nil {
			break
		}
	}
	fmt.Println(strconv.Itoa(n) + " children")
	time.Sleep(time.Hour)
}

// flood writes without end.
func flood() {
	line := []byte("0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcde\n")
	for {
		if _, err := os.Stderr.Write(line); err != nil {
			os.Exit(5)
		}
	}
}
