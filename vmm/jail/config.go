package jail

import (
	"errors"
	"fmt"
	"regexp"
)

// Config is what an operator sets. Node is set by the program.
type Config struct {
	Node        string // name of the node; its machines' cgroups lie under it. 1 to 40 lower-case letters, digits, dashes
	Bubblewrap  string `env:"EPHEMERAL_BUBBLEWRAP" envDefault:"bwrap" help:"bubblewrap program, a name in PATH or a path"`
	RunDir      string `env:"EPHEMERAL_RUN_DIR" envDefault:"/run/ephemeral" help:"directory of the host-wide lock file of user ids"`
	Cgroup      string `env:"EPHEMERAL_CGROUP" envDefault:"ephemeral" help:"cgroup, below the root, that holds those of all nodes"`
	FirstUID    int    `env:"EPHEMERAL_FIRST_UID" envDefault:"20000" help:"first of the user and group ids that machines run under"`
	UIDs        int    `env:"EPHEMERAL_UIDS" envDefault:"10000" help:"number of user ids, the most machines at once on a host"`
	OverheadMiB int    `env:"EPHEMERAL_VMM_OVERHEAD_MIB" envDefault:"256" help:"memory that a VMM may use beside its guest's, MiB"`
	Pids        int    `env:"EPHEMERAL_VMM_PIDS" envDefault:"128" help:"most processes and threads of one VMM"`
	CPUWeight   int    `env:"EPHEMERAL_VMM_CPU_WEIGHT" envDefault:"50" help:"share of the CPU under contention, 1 to 10000 (100: as everything else)"`
	OpenFiles   int    `env:"EPHEMERAL_VMM_OPEN_FILES" envDefault:"1024" help:"most open descriptors of a VMM process; one that needs more gets what it needs (Cloud Hypervisor: 4096)"`
	OOMScoreAdj int    `env:"EPHEMERAL_VMM_OOM_SCORE_ADJ" envDefault:"500" help:"how early the kernel kills machines when the host is out of memory, 0 to 1000"`
}

var (
	nodeName   = regexp.MustCompile(`^[a-z0-9][a-z0-9-]{0,39}$`)
	cgroupPath = regexp.MustCompile(`^[a-zA-Z0-9_][a-zA-Z0-9_.:@-]*(/[a-zA-Z0-9_][a-zA-Z0-9_.:@-]*)*$`)
)

// Validate says all that is wrong with the configuration.
func (c Config) Validate() error {
	var errs []error
	check := func(ok bool, format string, args ...any) {
		if !ok {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	check(nodeName.MatchString(c.Node), "node name %q must match %s", c.Node, nodeName)
	check(c.Bubblewrap != "", "EPHEMERAL_BUBBLEWRAP is empty")
	check(c.RunDir != "" && c.RunDir[0] == '/', "EPHEMERAL_RUN_DIR %q must be an absolute path", c.RunDir)
	check(cgroupPath.MatchString(c.Cgroup), "EPHEMERAL_CGROUP %q must match %s", c.Cgroup, cgroupPath)
	check(c.FirstUID >= 1000 && c.FirstUID < 1<<31, "EPHEMERAL_FIRST_UID %d must be 1000 or more", c.FirstUID)
	check(c.UIDs >= 1 && c.UIDs <= 1<<20, "EPHEMERAL_UIDS %d must be 1 to 1048576", c.UIDs)
	check(c.OverheadMiB >= 16, "EPHEMERAL_VMM_OVERHEAD_MIB %d must be 16 or more", c.OverheadMiB)
	check(c.Pids >= 8, "EPHEMERAL_VMM_PIDS %d must be 8 or more", c.Pids)
	check(c.CPUWeight >= 1 && c.CPUWeight <= 10000, "EPHEMERAL_VMM_CPU_WEIGHT %d must be 1 to 10000", c.CPUWeight)
	check(c.OpenFiles >= 64, "EPHEMERAL_VMM_OPEN_FILES %d must be 64 or more", c.OpenFiles)
	check(c.OOMScoreAdj >= 0 && c.OOMScoreAdj <= 1000, "EPHEMERAL_VMM_OOM_SCORE_ADJ %d must be 0 to 1000", c.OOMScoreAdj)
	return errors.Join(errs...)
}
