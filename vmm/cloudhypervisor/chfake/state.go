package chfake

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// states of the machine.
type state string

const (
	none     state = ""        // no configuration
	created  state = "Created" // a configuration, no machine
	running  state = "Running"
	paused   state = "Paused"
	netLimit       = 1 // cards, more are not needed
)

// vmm is the process: at most one machine.
type vmm struct {
	options Options
	events  *os.File
	guests  *guests

	mu     sync.Mutex
	state  state
	config object
	guest  *guest
	taps   []int
}

type object = map[string]any

// call is one of the API.
type call struct {
	method string
	body   bool
	do     func(v *vmm, body []byte, files []int) (any, error)
}

var calls map[string]call

func init() {
	without := func(do func(*vmm) (any, error)) func(*vmm, []byte, []int) (any, error) {
		return func(v *vmm, _ []byte, _ []int) (any, error) {
			v.mu.Lock()
			defer v.mu.Unlock()
			return do(v)
		}
	}
	with := func(do func(*vmm, object, []int) (any, error)) func(*vmm, []byte, []int) (any, error) {
		return func(v *vmm, body []byte, files []int) (any, error) {
			var o object
			if err := json.Unmarshal(body, &o); err != nil {
				return nil, err
			}
			v.mu.Lock()
			defer v.mu.Unlock()
			return do(v, o, files)
		}
	}
	calls = map[string]call{
		"vmm.ping":        {http.MethodGet, false, without((*vmm).ping)},
		"vmm.shutdown":    {http.MethodPut, false, without(func(*vmm) (any, error) { return nil, nil })},
		"vm.info":         {http.MethodGet, false, without((*vmm).info)},
		"vm.counters":     {http.MethodGet, false, without((*vmm).counters)},
		"vm.create":       {http.MethodPut, true, with((*vmm).create)},
		"vm.add-net":      {http.MethodPut, true, with((*vmm).addNet)},
		"vm.boot":         {http.MethodPut, false, without((*vmm).boot)},
		"vm.pause":        {http.MethodPut, false, without((*vmm).pause)},
		"vm.resume":       {http.MethodPut, false, without((*vmm).resume)},
		"vm.shutdown":     {http.MethodPut, false, without((*vmm).shutdown)},
		"vm.delete":       {http.MethodPut, false, without((*vmm).remove)},
		"vm.power-button": {http.MethodPut, false, without((*vmm).button)},
		"vm.snapshot":     {http.MethodPut, true, with((*vmm).snapshot)},
		"vm.restore":      {http.MethodPut, true, with((*vmm).restore)},
	}
}

func (v *vmm) alive() bool { return v.state == running || v.state == paused }

func (v *vmm) ping() (any, error) {
	return object{"build_version": v.options.Answers, "version": strings.TrimPrefix(v.options.Answers, "v") + ".0", "pid": os.Getpid(), "features": []string{"kvm"}}, nil
}

func (v *vmm) info() (any, error) {
	if v.state == none {
		return nil, refuse(http.StatusNotFound, "The VM info is not available", "VM is not created")
	}
	return object{"config": v.config, "state": v.state, "memory_actual_size": 0}, nil
}

func (v *vmm) counters() (any, error) {
	if !v.alive() {
		return nil, refuse(http.StatusInternalServerError, "The VM info is not available", "VM is not running")
	}
	return object{"root": map[string]uint64{"read_bytes": 0, "read_ops": 0, "read_latency_min": 1<<64 - 1, "read_latency_avg": (1<<64 - 1) / 10000}}, nil
}

func (v *vmm) create(o object, _ []int) (any, error) {
	if v.state != none {
		return nil, refuse(http.StatusInternalServerError, "The VM could not be created", "VM is already created")
	}
	for _, name := range []string{"cpus", "memory", "payload", "vsock"} {
		if _, ok := o[name].(object); o[name] != nil && !ok {
			return nil, fmt.Errorf("invalid type of %s", name)
		}
	}
	v.config, v.state = o, created
	return nil, nil
}

func (v *vmm) addNet(o object, files []int) (any, error) {
	const what = "The network device could not be added to the VM"
	if v.state == none {
		return nil, refuse(http.StatusNotFound, what, "VM is not created")
	}
	if len(files) > 0 {
		o["fds"] = make([]int, len(files))
		for i := range files {
			o["fds"].([]int)[i] = -1
			fd, err := unix.Dup(files[i])
			if err != nil {
				return nil, refuse(http.StatusInternalServerError, what, err.Error())
			}
			v.taps = append(v.taps, fd)
		}
	}
	nets, _ := v.config["net"].([]any)
	if len(nets) >= netLimit {
		return nil, refuse(http.StatusInternalServerError, what, "more cards than this fake has")
	}
	v.config["net"] = append(nets, o)
	return nil, nil
}

func (v *vmm) boot() (any, error) {
	const what = "The VM could not boot"
	switch {
	case v.state == none:
		return nil, refuse(http.StatusNotFound, what, "VM config is missing")
	case v.alive():
		return nil, refuse(http.StatusInternalServerError, what, "VM is already created")
	}
	payload, _ := v.config["payload"].(object)
	if payload["kernel"] == nil {
		return nil, refuse(http.StatusInternalServerError, what, "Failed to validate config", "Payload configuration is not bootable", "No bootitem provided: neither firmware nor kernel")
	}
	v.emit("vm", "booting")
	if err := v.devices(payload["kernel"], payload["initramfs"]); err != nil {
		return nil, refuse(http.StatusInternalServerError, what, err.Error())
	}
	g, err := v.newGuest(nil)
	if err != nil {
		return nil, refuse(http.StatusInternalServerError, what, "Error from device manager", "Cannot create virtio-vsock backend", "Error binding to the host-side Unix socket", err.Error())
	}
	v.guest, v.state = g, running
	v.emit("vm", "booted")
	g.resume()
	return nil, nil
}

// devices opens the files of a configuration.
func (v *vmm) devices(more ...any) error {
	disks, _ := v.config["disks"].([]any)
	for _, d := range disks {
		disk, _ := d.(object)
		more = append(more, disk["path"])
	}
	for _, path := range more {
		if path == nil {
			continue
		}
		f, err := os.Open(host(fmt.Sprint(path)))
		if err != nil {
			return fmt.Errorf("cannot open %v: %w", path, err)
		}
		_ = f.Close()
	}
	_, _, err := v.zone()
	return err
}

// zone is the file of the guest's memory, and whether it is shared; "": it has none.
func (v *vmm) zone() (file string, shared bool, err error) {
	memory, _ := v.config["memory"].(object)
	zones, _ := memory["zones"].([]any)
	if len(zones) == 0 {
		return "", false, nil
	}
	zone, _ := zones[0].(object)
	shared, _ = zone["shared"].(bool)
	file, _ = zone["file"].(string)
	size, _ := zone["size"].(float64)
	flags := os.O_RDONLY
	if shared {
		flags = os.O_RDWR
	}
	f, err := os.OpenFile(host(file), flags, 0)
	if err != nil {
		return "", false, err
	}
	defer func() { _ = f.Close() }()
	if info, err := f.Stat(); err != nil || info.Size() < int64(size) {
		return "", false, fmt.Errorf("memory mapping past the end of %s (%v)", file, err)
	}
	return file, shared, nil
}

// transition is the real one's refusal of a change to the state that is there.
func (v *vmm) transition(what, component string) error {
	return refuse(http.StatusInternalServerError, what, "Cannot "+component+" VM", "Failed to "+component+" migratable component",
		fmt.Sprintf("Invalid transition: InvalidStateTransition(%s, %s)", v.state, v.state))
}

func (v *vmm) pause() (any, error) {
	const what = "The VM could not be paused"
	switch {
	case !v.alive():
		return nil, refuse(http.StatusInternalServerError, what, "VM is not running")
	case v.state == paused:
		return nil, v.transition(what, "pause")
	}
	v.emit("vm", "pausing")
	v.guest.pause()
	v.state = paused
	v.emit("vm", "paused")
	return nil, nil
}

func (v *vmm) resume() (any, error) {
	const what = "The VM could not resume"
	switch {
	case !v.alive():
		return nil, refuse(http.StatusInternalServerError, what, "VM is not running")
	case v.state == running:
		return nil, v.transition(what, "resume")
	}
	v.emit("vm", "resuming")
	v.guest.resume()
	v.state = running
	v.emit("vm", "resumed")
	return nil, nil
}

func (v *vmm) shutdown() (any, error) {
	if !v.alive() {
		return nil, refuse(http.StatusInternalServerError, "The VM could not shutdown", "VM is not running")
	}
	v.end()
	v.state = created
	return nil, nil
}

// end destroys the machine.
func (v *vmm) end() {
	v.guest.close()
	v.guest = nil
	v.emit("vm", "shutdown")
}

func (v *vmm) remove() (any, error) {
	if v.alive() {
		v.end()
	}
	v.config, v.state = nil, none
	for _, fd := range v.taps {
		_ = unix.Close(fd)
	}
	v.taps = nil
	v.emit("vm", "deleted")
	return nil, nil
}

func (v *vmm) button() (any, error) {
	if !v.alive() {
		return nil, refuse(http.StatusInternalServerError, "Error triggering power button", "VM is not running")
	}
	return nil, nil
}

// exit ends the process as vmm.shutdown and a guest's power-off do.
func (v *vmm) exit() {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.state != none {
		_, _ = v.remove()
	}
	v.emit("vmm", "shutdown")
	os.Exit(0)
}

// saying is an error in the words of the real one.
func saying(format string, args ...any) error { return fmt.Errorf(format, args...) }

// directory reads a URL of the API.
func directory(o object, name string) (string, error) {
	url, _ := o[name].(string)
	dir, ok := strings.CutPrefix(url, "file://")
	if !ok {
		return "", saying("Could not convert %q to a path", url)
	}
	dir = host(dir)
	if info, err := os.Stat(dir); err != nil || !info.IsDir() {
		return "", saying("Destination is not a directory: %q", dir)
	}
	return dir, nil
}

func (v *vmm) snapshot(o object, _ []int) (any, error) {
	const what = "The VM could not be snapshotted"
	fail := func(causes ...string) (any, error) {
		return nil, refuse(http.StatusInternalServerError, append([]string{what}, causes...)...)
	}
	switch {
	case !v.alive():
		return fail("VM is not running")
	case v.state != paused:
		return fail("Cannot snapshot VM", "Failed to snapshot migratable component", "Trying to snapshot while VM is running")
	}
	dir, err := directory(o, "destination_url")
	if err != nil {
		return fail("Cannot send VM snapshot", err.Error())
	}
	v.emit("vm", "snapshotting")
	v.emit("vm", "snapshotted") // before anything is written, as it is
	if err := v.write(dir); err != nil {
		return fail("Cannot send VM snapshot", err.Error())
	}
	return nil, nil
}

// write makes a snapshot's files. Memory of the guest that is no shared file goes into one of its own.
func (v *vmm) write(dir string) error {
	file, shared, err := v.zone()
	if err != nil {
		return err
	}
	memory, err := v.guest.memory()
	if err != nil {
		return err
	}
	if shared {
		f, err := os.OpenFile(host(file), os.O_WRONLY, 0)
		if err != nil {
			return err
		}
		_, err = f.Write(append(memory, 0))
		if err = errors.Join(err, f.Close()); err != nil {
			return err
		}
	} else if err := v.writeMemory(filepath.Join(dir, "memory-ranges"), memory); err != nil {
		return err
	}
	config, err := json.Marshal(v.config)
	if err != nil {
		return err
	}
	// A real state has some 50 KB.
	inner, err := json.Marshal(object{"fill": strings.Repeat("0123456789abcdef", 3000)})
	if err != nil {
		return err
	}
	content, err := json.Marshal(object{"snapshots": object{}, "snapshot_data": object{"state": string(inner)}})
	if err != nil {
		return err
	}
	return errors.Join(create(filepath.Join(dir, "config.json"), config), create(filepath.Join(dir, "state.json"), content))
}

// writeMemory makes a file of the memory's size.
func (v *vmm) writeMemory(path string, memory []byte) error {
	if err := create(path, append(memory, 0)); err != nil {
		return err
	}
	config, _ := v.config["memory"].(object)
	size, _ := config["size"].(float64)
	return os.Truncate(path, int64(size))
}

func create(path string, content []byte) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if errors.Is(err, os.ErrExist) {
		return saying("File exists (os error 17)")
	}
	if err != nil {
		return err
	}
	_, err = f.Write(content)
	return errors.Join(err, f.Close())
}

func (v *vmm) restore(o object, files []int) (any, error) {
	const what = "The VM could not be restored"
	if v.state != none {
		return nil, refuse(http.StatusInternalServerError, what, "VM is already created")
	}
	if err := v.load(o, files); err != nil {
		_, _ = v.remove()
		return nil, refuse(http.StatusInternalServerError, what, err.Error())
	}
	v.state = paused
	v.emit("vm", "restoring")
	v.emit("vm", "restored")
	return nil, nil
}

// load reads a snapshot's files.
func (v *vmm) load(o object, files []int) error {
	dir, err := directory(o, "source_url")
	if err != nil {
		return err
	}
	content, err := os.ReadFile(filepath.Join(dir, "config.json"))
	if err != nil {
		return err
	}
	if err := json.Unmarshal(content, &v.config); err != nil {
		return saying("Failed to deserialize: %w", err)
	}
	link, err := os.Readlink(filepath.Join(dir, "state.json"))
	if err != nil {
		return err
	}
	if content, err = os.ReadFile(host(link)); err != nil {
		return err
	}
	if !json.Valid(content) {
		return saying("Failed to deserialize the state")
	}
	if err := v.cards(o, files); err != nil {
		return err
	}
	payload, _ := v.config["payload"].(object)
	if err := v.devices(payload["initramfs"]); err != nil {
		return err
	}
	file, shared, err := v.zone()
	if err != nil {
		return err
	}
	if shared {
		return errors.New("this fake restores from a file zone that is not shared, or from memory in the snapshot")
	}
	if file == "" {
		if file, err = os.Readlink(filepath.Join(dir, "memory-ranges")); err != nil {
			return err
		}
	}
	memory, err := os.ReadFile(host(file))
	if err != nil {
		return err
	}
	v.guest, err = v.newGuest(memory)
	return err
}

// cards checks that each network card gets what it needs.
func (v *vmm) cards(o object, files []int) error {
	given := 0
	passed, _ := o["net_fds"].([]any)
	for _, p := range passed {
		n, _ := p.(object)["num_fds"].(float64)
		given += int(n)
	}
	if given != len(files) {
		return fmt.Errorf("%d descriptors where %d are told", len(files), given)
	}
	nets, _ := v.config["net"].([]any)
	for _, n := range nets {
		card, _ := n.(object)
		if card["host_mac"] != nil {
			return errors.New("setting the address of a tap: Operation not permitted")
		}
		if _, byFile := card["fds"]; byFile && given == 0 {
			return saying("Net id %v is associated with FDs and is required", card["id"])
		}
	}
	return nil
}
