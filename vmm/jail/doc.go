// Package jail is the wall around the VMM's process, for the case that a guest has broken out into it. Each machine has
// one Cell: a user id of its own, a cgroup, and a launcher that starts programs under bubblewrap with no capability, no way
// to gain one, their own pid, mount, ipc, uts, cgroup and user namespaces, the network namespace of the node, a root of
// which only the machine's directory is writable, bounded descriptors and no core dumps.
//
// # How a launch goes
//
// The thread that lives in the node's network namespace forks (network.Do). Its child is inside the cell's cgroup from its
// first instruction, enters a pid namespace of its own, becomes the machine's user, asks for a SIGKILL when the thread ends
// (the node was killed or closed the network), and becomes bubblewrap, which makes the rest of the walls around a child of
// its own and then waits. Before that child becomes the program, the node sets its resource limits and its OOM score.
// Should the node be killed in the middle of this: bubblewrap asks for the signal once more and then writes to a pipe that
// only the node reads. So either one of the node's threads is still to end, which sends the signal, or the write fails and
// bubblewrap gives up.
//
// Bubblewrap's first process is the init of the outer pid namespace: when it ends, for whatever reason, the kernel has
// killed and reaped everything in the jail before anybody sees it ended.
//
// # Memory
//
// The cgroup's limit is the guest's memory plus Config.OverheadMiB: under TCG the translation buffer (tb-size), QEMU's own
// heap and stacks, and page tables; 256 MiB cover it with tb-size 64. A clone maps the template's memory file privately:
// pages that it only reads stay in the page cache and are charged to the cgroup that touched them first (often the one that
// made the template; cgroup v1 and v2 alike), pages that it writes are its own. So the limit must cover the guest's whole
// memory although most of it is shared. Page cache of a file on disk is reclaimed before the limit kills anybody; that of
// a file on tmpfs is not.
package jail
