package cloudhypervisor

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"github.com/ephemeral-run/ephemeral/vmm"
)

// Names inside a machine. Devices have explicit ids, so that they are the same in all machines.
const (
	zoneID   = "ram"
	diskID   = "root"
	netID    = "net"
	vsockID  = "vsock"
	guestCID = 3 // every guest's: machines are told apart by their sockets

	// Relative to the machine's directory, in which the process runs. "./" because landlock's rule for the socket's
	// directory is made of the path.
	vsockPath   = "./" + vsockName
	consolePath = "./" + consoleLog
	vsockName   = "vsock"
	consoleLog  = "console.log"
)

// vmConfig is what vm.create takes, as far as machines need it.
type vmConfig struct {
	CPUs     cpuConfig      `json:"cpus"`
	Memory   memoryConfig   `json:"memory"`
	Payload  payloadConfig  `json:"payload"`
	Disks    []diskConfig   `json:"disks"`
	RNG      rngConfig      `json:"rng"`
	Vsock    vsockConfig    `json:"vsock"`
	Serial   consoleConfig  `json:"serial"`
	Console  consoleConfig  `json:"console"`
	PVPanic  bool           `json:"pvpanic"`
	Landlock bool           `json:"landlock_enable,omitempty"`
	Rules    []landlockRule `json:"landlock_rules,omitempty"`
}

type cpuConfig struct {
	Boot   int  `json:"boot_vcpus"`
	Max    int  `json:"max_vcpus"`
	Nested bool `json:"nested"`
}

type memoryConfig struct {
	Size  int64        `json:"size"` // 0 with zones
	THP   bool         `json:"thp"`
	Zones []zoneConfig `json:"zones,omitempty"`
}

type zoneConfig struct {
	ID     string `json:"id"`
	Size   int64  `json:"size"`
	File   string `json:"file"`
	Shared bool   `json:"shared"`
}

type payloadConfig struct {
	Kernel    string `json:"kernel"`
	Initramfs string `json:"initramfs"`
	Cmdline   string `json:"cmdline"`
}

type diskConfig struct {
	ID       string `json:"id"`
	Path     string `json:"path"`
	Readonly bool   `json:"readonly"`
	Type     string `json:"image_type"`
	Serial   string `json:"serial"`
	Sparse   bool   `json:"sparse"` // give back discarded blocks; of a file that nobody writes there are none
}

type netConfig struct {
	ID  string `json:"id"`
	MAC string `json:"mac"`
	Tap string `json:"tap,omitempty"` // else by descriptor
}

type rngConfig struct {
	Source string `json:"src"`
}

type vsockConfig struct {
	ID     string `json:"id"`
	CID    int    `json:"cid"`
	Socket string `json:"socket"`
}

type consoleConfig struct {
	Mode string `json:"mode"`
	File string `json:"file,omitempty"`
}

type landlockRule struct {
	Path   string `json:"path"`
	Access string `json:"access"`
}

// bootConfig is the machine of a spec, without its network card.
func (d *Driver) bootConfig(s vmm.Spec) vmConfig {
	c := vmConfig{
		CPUs:    cpuConfig{Boot: s.Shape.VCPUs, Max: s.Shape.VCPUs}, // not nested: a guest has no use for KVM
		Memory:  plainMemory(s),
		Payload: payloadConfig{Kernel: s.Image.Kernel, Initramfs: s.Image.Initramfs, Cmdline: d.kernelArgs()},
		// The type is told, since a guessed one makes the first sector unwritable; the serial number too, since the default
		// tells of the host's file system.
		Disks:   []diskConfig{{ID: diskID, Path: s.Image.RootFS, Readonly: true, Type: "Raw", Serial: diskID}},
		RNG:     rngConfig{Source: "/dev/urandom"},
		Vsock:   vsockConfig{ID: vsockID, CID: guestCID, Socket: vsockPath},
		Serial:  consoleConfig{Mode: "Off"},
		Console: consoleConfig{Mode: "Off"},
		PVPanic: true,
	}
	if s.RAM != "" {
		// Huge pages would make a clone copy 2 MiB where it writes one byte.
		c.Memory = memoryConfig{Zones: []zoneConfig{{ID: zoneID, Size: memorySize(s), File: s.RAM, Shared: true}}}
	}
	if d.config.Console {
		c.Serial = consoleConfig{Mode: "File", File: consolePath}
	}
	if d.landlock {
		c.Landlock, c.Rules = true, landlockRules(s)
	}
	return c
}

// plainMemory is the process's own.
func plainMemory(s vmm.Spec) memoryConfig { return memoryConfig{Size: memorySize(s), THP: true} }

func memorySize(s vmm.Spec) int64 { return int64(s.Shape.MemoryMiB) << 20 }

// landlockRules are what a process may reach beside the files of its configuration: its own directory, and of a tap that it
// opens by name the flags.
func landlockRules(s vmm.Spec) []landlockRule {
	rules := []landlockRule{{s.Dir, "rw"}}
	if s.NIC != nil && s.NIC.File == nil {
		for _, path := range tapDirectories {
			rules = append(rules, landlockRule{path, "r"})
		}
		rules = append(rules, landlockRule{tunDevice, "rw"}) // the card is added after landlock is in force
	}
	return rules
}

const tunDevice = "/dev/net/tun"

// tapDirectories is where a tap's flags are found.
var tapDirectories = []string{"/sys/class/net", "/sys/devices/virtual/net"}

func nicConfig(n vmm.NIC) netConfig {
	c := netConfig{ID: netID, MAC: n.MAC.String()}
	if n.File == nil {
		c.Tap = n.Tap
	}
	return c
}

// kernelArgs is the guest kernel's command line.
func (d *Driver) kernelArgs() string {
	args := []string{
		"panic=-1",              // a panic resets at once, and a reset ends the machine
		"random.trust_cpu=on",   // do not wait for entropy; Prepare reseeds before anything untrusted runs
		"clocksource=kvm-clock", // the clock that is put forward when a clone is resumed
		"no_timer_check",        // the timer's self-test fails on a busy host
		"cryptomgr.notests",     // no self-tests of ciphers at boot
		"8250.nr_uarts=1",       // look for one serial port, not for 32
		"net.ifnames=0",         // the network card is eth0
	}
	if d.config.Console {
		args = append(args, "console=ttyS0")
	} else {
		args = append(args, "quiet", "loglevel=0") // messages to no console still cost time
	}
	return strings.Join(args, " ")
}

// object is a JSON object whose members that nobody here knows stay as they are.
type object map[string]json.RawMessage

// set replaces a member.
func (o object) set(name string, value any) error {
	raw, err := json.Marshal(value)
	if err != nil {
		return err
	}
	o[name] = raw
	return nil
}

// edit replaces a member by what change makes of it. The member must be there, and an object.
func (o object) edit(name string, change func(object) error) error {
	var member object
	if err := json.Unmarshal(o[name], &member); err != nil || member == nil {
		return fmt.Errorf("%s is no object (%v)", name, err)
	}
	if err := change(member); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return o.set(name, member)
}

// editOnly is edit for the single element of a list.
func (o object) editOnly(name string, change func(object) error) error {
	var list []object
	if err := json.Unmarshal(o[name], &list); err != nil || len(list) != 1 || list[0] == nil {
		return fmt.Errorf("%s is not a list of one object (%v)", name, err)
	}
	if err := change(list[0]); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return o.set(name, list)
}

// cloneConfig makes a clone's configuration of its template's: the memory file ram is mapped privately (""; there is none,
// the memory is copied), files are where they are now, the network card is the clone's. Everything else stays as the
// template's state has it.
func cloneConfig(template []byte, s vmm.Spec, ram string, landlock bool) ([]byte, error) {
	var c object
	if err := json.Unmarshal(template, &c); err != nil || c == nil {
		return nil, fmt.Errorf("read configuration: not an object (%v)", err)
	}
	// Private memory cannot be given back to the host, and is to be brought in page by page.
	delete(c, "balloon")
	errs := []error{
		c.edit("memory", func(m object) error {
			delete(m, "prefault")
			if ram == "" {
				return nil
			}
			return m.editOnly("zones", func(z object) error {
				delete(z, "prefault")
				return errors.Join(z.set("file", ram), z.set("shared", false))
			})
		}),
		c.edit("payload", func(p object) error {
			delete(p, "initramfs") // it would have to be there, and is in the memory since long
			return p.set("kernel", s.Image.Kernel)
		}),
		c.editOnly("disks", func(d object) error { return d.set("path", s.Image.RootFS) }),
		c.edit("vsock", func(v object) error { return v.set("socket", vsockPath) }),
		cloneNIC(c, s.NIC),
	}
	if _, ok := c["serial"]; ok {
		errs = append(errs, c.edit("serial", func(o object) error {
			if _, file := o["file"]; !file {
				return nil
			}
			return o.set("file", consolePath)
		}))
	}
	delete(c, "landlock_rules")
	errs = append(errs, c.set("landlock_enable", landlock))
	if landlock {
		errs = append(errs, c.set("landlock_rules", landlockRules(s)))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, fmt.Errorf("edit configuration: %w", err)
	}
	return json.Marshal(c)
}

// cloneNIC gives the card the clone's tap. Its guest's address is in the state.
func cloneNIC(c object, nic *vmm.NIC) error {
	if nic == nil {
		if raw, ok := c["net"]; ok && string(raw) != "null" && string(raw) != "[]" {
			return errors.New("net: the clone has no network card")
		}
		return nil
	}
	return c.editOnly("net", func(n object) error {
		// The template's tap had another address; to set that of the clone's takes privileges.
		for _, name := range []string{"host_mac", "tap", "fds", "ip", "mask", "mtu"} {
			delete(n, name)
		}
		if nic.File == nil {
			return n.set("tap", nic.Tap)
		}
		return n.set("fds", []int{-1}) // a place for the descriptor that comes with the call
	})
}

// visible are the paths of a booting machine that the process has to see.
func visible(s vmm.Spec) []string {
	paths := []string{s.Image.Kernel, s.Image.Initramfs, s.Image.RootFS}
	return append(paths, visibleNIC(s)...)
}

func visibleNIC(s vmm.Spec) []string {
	if s.NIC == nil || s.NIC.File != nil {
		return nil
	}
	return tapDirectories
}
