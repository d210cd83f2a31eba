package jail

import (
	"bytes"
	"encoding/binary"
	"fmt"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// denied are system calls that no VMM needs and that have given attackers of the kernel a way in, or that reach beyond the
// jail. A VMM's own filter (QEMU's -sandbox, cloud-hypervisor's --seccomp) is far tighter; this one holds also before that
// is in force, and without it.
var denied = append([]uintptr{
	// Other processes.
	unix.SYS_PTRACE, unix.SYS_PROCESS_VM_READV, unix.SYS_PROCESS_VM_WRITEV, unix.SYS_KCMP, unix.SYS_PIDFD_GETFD,
	unix.SYS_MOVE_PAGES, unix.SYS_PROCESS_MADVISE,
	// Namespaces and mounts.
	unix.SYS_UNSHARE, unix.SYS_SETNS, unix.SYS_CHROOT, unix.SYS_PIVOT_ROOT, unix.SYS_MOUNT, unix.SYS_UMOUNT2,
	unix.SYS_FSOPEN, unix.SYS_FSCONFIG, unix.SYS_FSMOUNT, unix.SYS_FSPICK, unix.SYS_OPEN_TREE, unix.SYS_MOVE_MOUNT,
	unix.SYS_MOUNT_SETATTR, unix.SYS_NAME_TO_HANDLE_AT, unix.SYS_OPEN_BY_HANDLE_AT, unix.SYS_SETHOSTNAME,
	unix.SYS_SETDOMAINNAME,
	// Large and young parts of the kernel.
	unix.SYS_BPF, unix.SYS_PERF_EVENT_OPEN, unix.SYS_USERFAULTFD, unix.SYS_IO_URING_SETUP, unix.SYS_IO_URING_ENTER,
	unix.SYS_IO_URING_REGISTER, unix.SYS_FANOTIFY_INIT, unix.SYS_ADD_KEY, unix.SYS_KEYCTL, unix.SYS_REQUEST_KEY,
	unix.SYS_PERSONALITY, unix.SYS_LOOKUP_DCOOKIE, unix.SYS_QUOTACTL, unix.SYS_VHANGUP,
	// The host as a whole.
	unix.SYS_INIT_MODULE, unix.SYS_FINIT_MODULE, unix.SYS_DELETE_MODULE, unix.SYS_KEXEC_LOAD, unix.SYS_KEXEC_FILE_LOAD,
	unix.SYS_REBOOT, unix.SYS_SWAPON, unix.SYS_SWAPOFF, unix.SYS_SETTIMEOFDAY, unix.SYS_CLOCK_SETTIME,
	unix.SYS_CLOCK_ADJTIME, unix.SYS_ADJTIMEX, unix.SYS_ACCT, unix.SYS_SYSLOG,
}, deniedHere...)

// namespaces are the flags of clone that make one.
const namespaces = unix.CLONE_NEWUSER | unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWNET | unix.CLONE_NEWIPC |
	unix.CLONE_NEWUTS | unix.CLONE_NEWCGROUP

// families of sockets that a program may make. In its network namespace the internet ones lead nowhere; they serve to set
// up a network card. AF_VSOCK is not among them: it knows no namespaces.
var families = []uint32{unix.AF_UNIX, unix.AF_INET, unix.AF_INET6}

// Offsets in struct seccomp_data, seccomp(2). Arguments are 64 bits, the low half first on little-endian machines.
const (
	offsetNumber = 0
	offsetArch   = 4
	offsetArg0   = 16
)

// What the filter answers: the system call goes ahead, the program is killed, or the call fails with an error.
var (
	allow    = bpf.RetConstant{Val: unix.SECCOMP_RET_ALLOW}
	kill     = bpf.RetConstant{Val: unix.SECCOMP_RET_KILL_PROCESS}
	noPerm   = bpf.RetConstant{Val: unix.SECCOMP_RET_ERRNO | uint32(unix.EPERM)}
	noSys    = bpf.RetConstant{Val: unix.SECCOMP_RET_ERRNO | uint32(unix.ENOSYS)}
	noFamily = bpf.RetConstant{Val: unix.SECCOMP_RET_ERRNO | uint32(unix.EAFNOSUPPORT)}
)

// filter is the seccomp program, as an array of struct sock_filter in this machine's byte order.
func filter() ([]byte, error) {
	program := []bpf.Instruction{
		bpf.LoadAbsolute{Off: offsetArch, Size: 4},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: auditArch, SkipTrue: 1},
		kill,
		bpf.LoadAbsolute{Off: offsetNumber, Size: 4},
		// Numbers from 2^30 on are those of x32, another way to the same calls.
		bpf.JumpIf{Cond: bpf.JumpLessThan, Val: 1 << 30, SkipTrue: 1},
		noSys,
	}
	answer := func(number uintptr, body ...bpf.Instruction) {
		program = append(program, bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: uint32(number), SkipTrue: uint8(len(body))})
		program = append(program, body...)
	}
	// The flags of clone3 lie in memory, where a filter cannot look: without it, programs use clone.
	answer(unix.SYS_CLONE3, noSys)
	answer(unix.SYS_CLONE,
		bpf.LoadAbsolute{Off: offsetArg0, Size: 4},
		bpf.JumpIf{Cond: bpf.JumpBitsNotSet, Val: namespaces, SkipTrue: 1},
		noPerm,
		allow)
	known := []bpf.Instruction{bpf.LoadAbsolute{Off: offsetArg0, Size: 4}}
	for _, f := range families {
		known = append(known, bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: f, SkipTrue: 1}, allow)
	}
	answer(unix.SYS_SOCKET, append(known, noFamily)...)
	for _, number := range denied {
		answer(number, noPerm)
	}
	program = append(program, allow)

	raw, err := bpf.Assemble(program)
	if err != nil {
		return nil, fmt.Errorf("assemble seccomp filter: %w", err)
	}
	var b bytes.Buffer
	for _, i := range raw {
		// struct sock_filter { __u16 code; __u8 jt, jf; __u32 k; }
		if err := binary.Write(&b, binary.NativeEndian, i); err != nil {
			return nil, fmt.Errorf("encode seccomp filter: %w", err)
		}
	}
	return b.Bytes(), nil
}
