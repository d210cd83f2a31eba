// Package doctor tells before the first run whether a host can run machines, and what to do where it cannot.
package doctor

import (
	"context"
	"fmt"
	"io"
	"sync"
	"time"
)

// Status is a check's outcome.
type Status string

// The outcomes. A Warn costs speed, isolation or headroom; with a Fail runs will not work.
const (
	OK   Status = "ok"
	Warn Status = "warn"
	Fail Status = "fail"
)

// Check is the outcome of one named check.
type Check struct {
	Name   string `json:"name"` // kebab-case; stable
	Status Status `json:"status"`
	Detail string `json:"detail"`        // what was found
	Fix    string `json:"fix,omitempty"` // what to do; empty when there is nothing to do
}

// Config says what the host has to carry.
type Config struct {
	DataDir  string // where machines, templates and Redis live; need not be there yet
	ImageDir string // directory of the image that machines boot from
	RedisURL string // empty: a private redis-server is needed
	QEMU     string // QEMU program, a path or a name; empty: qemu-system-x86_64
	// CloudHypervisor is that program, a path or a name; empty: cloud-hypervisor. Hypervisor is EPHEMERAL_HYPERVISOR.
	CloudHypervisor, Hypervisor string

	MemoryMiB   int  // of one machine; 0: 512
	MinReady    int  // machines kept ready
	MaxMachines int  // machines alive at once; 0: 1
	Host        Host // nil: this host
}

// checkTimeout bounds one check. Verifying an image reads a few hundred MiB at worst.
const checkTimeout = 30 * time.Second

// checks are all checks in the order of their report.
var checks = []struct {
	name string
	run  func(ctx context.Context, c *Config) Check
}{
	{"root", checkRoot},
	{"kvm", checkKVM},
	{"cloud-hypervisor", checkCloudHypervisor},
	{"landlock", checkLandlock},
	{"userfaultfd", checkUserfaultfd},
	{"template-memory", checkTemplates},
	{"tun", checkTun},
	{"network-namespaces", checkNetworkNamespaces},
	{"nftables", checkNFTables},
	{"cgroups", checkCgroups},
	{"user-namespaces", checkUserNamespaces},
	{"qemu", checkQEMU},
	{"bubblewrap", checkBubblewrap},
	{"redis-server", checkRedis},
	{"redis-persistence", checkPersistence},
	{"mmdebstrap", checkMmdebstrap},
	{"mkfs-erofs", checkMkfsErofs},
	{"image", checkImage},
	{"memory", checkMemory},
	{"disk", checkDisk},
	{"inodes", checkInodes},
	{"open-files", checkOpenFiles},
	{"clock-source", checkClockSource},
	{"entropy", checkEntropy},
}

// Run makes all checks, at the same time, and returns them in a fixed order. It changes nothing on the host. A check that
// takes longer than 30 seconds, or longer than ctx, fails.
func Run(ctx context.Context, c Config) []Check {
	if c.Host == nil {
		c.Host = System{}
	}
	if c.QEMU == "" {
		c.QEMU = "qemu-system-x86_64"
	}
	if c.CloudHypervisor == "" {
		c.CloudHypervisor = cloudHypervisor
	}
	if c.MemoryMiB <= 0 {
		c.MemoryMiB = 512
	}
	c.MaxMachines = max(c.MaxMachines, c.MinReady, 1)
	out := make([]Check, len(checks))
	var all sync.WaitGroup
	for i, check := range checks {
		all.Go(func() {
			ctx, cancel := context.WithTimeout(ctx, checkTimeout)
			defer cancel()
			out[i] = check.run(ctx, &c)
			out[i].Name = check.name
		})
	}
	all.Wait()
	return out
}

// Worst is the worst status among the checks; OK when there are none.
func Worst(all []Check) Status {
	worst := OK
	for _, c := range all {
		if c.Status == Fail {
			return Fail
		}
		if c.Status == Warn {
			worst = Warn
		}
	}
	return worst
}

// WriteText writes the checks for a person: one line each, the fix below, and a summary.
func WriteText(w io.Writer, all []Check) error {
	count := map[Status]int{}
	for _, c := range all {
		count[c.Status]++
		if _, err := fmt.Fprintf(w, "%-4s  %-18s  %s\n", c.Status, c.Name, c.Detail); err != nil {
			return err
		}
		if c.Fix == "" {
			continue
		}
		if _, err := fmt.Fprintf(w, "%-4s  %-18s  fix: %s\n", "", "", c.Fix); err != nil {
			return err
		}
	}
	_, err := fmt.Fprintf(w, "%d ok, %d warn, %d fail\n", count[OK], count[Warn], count[Fail])
	return err
}

// ok, warn and fail make a check of what was found.
func ok(format string, args ...any) Check {
	return Check{Status: OK, Detail: fmt.Sprintf(format, args...)}
}

func warn(fix, format string, args ...any) Check {
	return Check{Status: Warn, Detail: fmt.Sprintf(format, args...), Fix: fix}
}

func fail(fix, format string, args ...any) Check {
	return Check{Status: Fail, Detail: fmt.Sprintf(format, args...), Fix: fix}
}
