package jail

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

var (
	// ErrInUse says that another live process on this host runs machines under that node's name.
	ErrInUse = errors.New("node's cgroup in use")
	// ErrClosed says that the jail or the cell was closed.
	ErrClosed = errors.New("jail closed")
	// ErrKilled says that the program was killed by Kill or Close.
	ErrKilled = errors.New("killed")
	// ErrMemory says that the kernel killed the program at its cgroup's memory limit.
	ErrMemory = errors.New("out of memory")
)

// endLimit is how long killed processes may take to end.
const endLimit = 10 * time.Second

// Jail gives out cells. Its methods are safe for concurrent use.
type Jail struct {
	config     Config
	bubblewrap string
	prlimit    string
	library    []mount
	filter     []byte // seccomp program
	uids       *uids
	cgroups    hierarchy

	mu     sync.Mutex
	cells  map[string]*Cell // by id
	closed bool
}

// Open checks what cells need (bubblewrap, cgroups, the lock file of user ids) and makes the node's cgroup. ErrInUse:
// another live process has it. It marks every open descriptor of this process close-on-exec. What an earlier life of the node left there stays until RemoveStale.
func Open(c Config) (*Jail, error) {
	if err := c.Validate(); err != nil {
		return nil, fmt.Errorf("jail configuration: %w", err)
	}
	// What this process inherited may be open without the close-on-exec flag, and would go on into every jail.
	if err := unix.CloseRange(3, math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC); err != nil {
		return nil, fmt.Errorf("mark open descriptors close-on-exec (Linux 5.11): %w", err)
	}
	bubblewrap, err := find(c.Bubblewrap, "bubblewrap")
	if err != nil {
		return nil, err
	}
	prlimit, err := find("prlimit", "util-linux")
	if err != nil {
		return nil, err
	}
	library, err := libraries()
	if err != nil {
		return nil, fmt.Errorf("system libraries: %w", err)
	}
	seccomp, err := filter()
	if err != nil {
		return nil, err
	}
	ids, err := openUIDs(c.RunDir, c.FirstUID, c.UIDs)
	if err != nil {
		return nil, fmt.Errorf("lock file of user ids: %w", err)
	}
	h, err := openHierarchy(c.Cgroup + "/" + c.Node)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("cgroup of node %s: %w", c.Node, err), ids.close())
	}
	return &Jail{
		config: c, bubblewrap: bubblewrap, prlimit: prlimit, library: library, filter: seccomp,
		uids: ids, cgroups: h, cells: map[string]*Cell{},
	}, nil
}

// find is the absolute path of a program that the named Debian package has.
func find(program, from string) (string, error) {
	path, err := exec.LookPath(program)
	if err == nil {
		path, err = filepath.Abs(path)
	}
	if err != nil {
		return "", fmt.Errorf("jail needs %s (Debian package %s): %w", program, from, err)
	}
	return path, nil
}

// CgroupVersion is "v1" or "v2": which one carries the limits on this host.
func (j *Jail) CgroupVersion() string { return j.cgroups.version() }

var cellID = regexp.MustCompile(`^[a-z0-9][a-z0-9-]{0,39}$`)

// New makes the cell of one machine: its user id and its cgroup. The id is 1 to 40 lower-case letters, digits and dashes,
// and must be of no other cell, also none of an earlier life. ErrNoUID: as many machines run as there are user ids.
func (j *Jail) New(id string, o Options) (*Cell, error) {
	if !cellID.MatchString(id) {
		return nil, fmt.Errorf("cell %q: id must match %s", id, cellID)
	}
	if err := o.validate(); err != nil {
		return nil, fmt.Errorf("cell %s: %w", id, err)
	}
	c := &Cell{jail: j, id: id, netns: o.Netns, running: map[*process]struct{}{}}
	c.close = sync.OnceValue(c.shut)
	if err := j.add(c); err != nil {
		return nil, fmt.Errorf("cell %s: %w", id, err)
	}
	if err := c.make(o); err != nil {
		j.forget(c)
		return nil, fmt.Errorf("cell %s: %w", id, err)
	}
	return c, nil
}

func (j *Jail) add(c *Cell) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.closed {
		return ErrClosed
	}
	if j.cells[c.id] != nil {
		return errors.New("exists")
	}
	j.cells[c.id] = c
	return nil
}

func (j *Jail) forget(c *Cell) {
	j.mu.Lock()
	defer j.mu.Unlock()
	delete(j.cells, c.id)
}

// Cgroups lists the ids of cells that an earlier life of this node left: there is a cgroup, but no cell of this jail.
func (j *Jail) Cgroups() ([]string, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.closed {
		return nil, ErrClosed
	}
	all, err := j.cgroups.list()
	if err != nil {
		return nil, fmt.Errorf("list cgroups of node %s: %w", j.config.Node, err)
	}
	return slices.DeleteFunc(all, func(id string) bool { return j.cells[id] != nil }), nil
}

// Stale counts what RemoveStale removed.
type Stale struct {
	Cgroups   int
	Processes int
}

// RemoveStale kills every process that an earlier life of this node left in its machines' cgroups, waits until they have
// ended, and removes the cgroups. Only members of those cgroups are signalled, each pinned first: no recycled pid is. It
// goes on after an error and joins them; when ctx ends it stops waiting.
func (j *Jail) RemoveStale(ctx context.Context) (Stale, error) {
	ids, err := j.Cgroups()
	if err != nil {
		return Stale{}, err
	}
	var stale Stale
	var errs []error
	for _, id := range ids {
		killed, err := empty(ctx, j.cgroups.load(id))
		stale.Processes += killed
		if err != nil {
			errs = append(errs, fmt.Errorf("remove cgroup of machine %s: %w", id, err))
			continue
		}
		stale.Cgroups++
	}
	return stale, errors.Join(errs...)
}

// Close closes every cell, and removes the node's cgroup unless an earlier life's cells are in it. It is idempotent.
func (j *Jail) Close() error {
	j.mu.Lock()
	if j.closed {
		j.mu.Unlock()
		return nil
	}
	j.closed = true
	cells := make([]*Cell, 0, len(j.cells))
	for _, c := range j.cells {
		cells = append(cells, c)
	}
	j.mu.Unlock()
	var errs []error
	for _, c := range cells {
		errs = append(errs, c.Close())
	}
	errs = append(errs, j.cgroups.close(), j.uids.close())
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("close jail: %w", err)
	}
	return nil
}
