// Package cloudhypervisor is the driver for Cloud Hypervisor, which needs KVM.
//
// # Process
//
// One process is one machine. It inherits a listening socket, over which it serves its REST API, and one end of a pipe,
// into which it writes its events. Neither leaves a file: the socket's name is removed before the process starts. Its
// working directory is the machine's own, where it makes "vsock", the socket through which the host reaches the guest; the
// sockets through which the guest reaches the host, "vsock_PORT", are made here. Names are relative, since a socket's may
// have only 107 bytes, and the same in all machines.
//
// # Templates
//
// A template's guest has its memory in a file, mapped shared; all that a snapshot has to write is the state of the
// devices, some 50 KB. A clone's configuration says of the same file that it is not shared: the kernel then maps it
// privately, and clones have in common what they did not write to. This is why machines have no balloon and no prefault, and
// why the file must never change: clones would see it. A clone is made from a directory of its own with its configuration
// and a link to the state.
//
// # Ends
//
// Cloud Hypervisor answers a guest's reset with a second life of it, and ends with exit code 0 also after failures. What
// happened is told by its events and its log: a machine ends at the first sign of a reset, and has powered off only when
// nothing says otherwise.
package cloudhypervisor
