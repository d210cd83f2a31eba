package cloudhypervisor

import (
	"context"
	"net/http"
)

// The calls of the API that the driver makes. All but ping and info change the machine.

// pingAnswer tells who answers.
type pingAnswer struct {
	Version string `json:"build_version"` // as --version prints it
}

func (c *client) ping(ctx context.Context) (pingAnswer, error) {
	var a pingAnswer
	err := c.get(ctx, "vmm.ping", &a)
	return a, err
}

// States of vm.info.
const (
	stateCreated  = "Created"
	stateRunning  = "Running"
	statePaused   = "Paused"
	stateShutdown = "Shutdown"
)

// info returns the machine's state.
func (c *client) info(ctx context.Context) (string, error) {
	var a struct {
		State string `json:"state"`
	}
	err := c.get(ctx, "vm.info", &a)
	return a.State, err
}

func (c *client) create(ctx context.Context, config vmConfig) error {
	return c.put(ctx, "vm.create", config)
}

// addNet adds a network card before boot; file is the tap's descriptor, or negative when config names the tap.
func (c *client) addNet(ctx context.Context, config netConfig, file int) error {
	if file < 0 {
		return c.put(ctx, "vm.add-net", config)
	}
	return c.putFiles(ctx, "vm.add-net", config, file)
}

func (c *client) boot(ctx context.Context) error   { return c.put(ctx, "vm.boot", nil) }
func (c *client) pause(ctx context.Context) error  { return c.put(ctx, "vm.pause", nil) }
func (c *client) resume(ctx context.Context) error { return c.put(ctx, "vm.resume", nil) }

// snapshot writes the machine's state into a directory that exists and is empty.
func (c *client) snapshot(ctx context.Context, dir string) error {
	return c.put(ctx, "vm.snapshot", map[string]string{"destination_url": "file://" + dir})
}

// restoredNet says how many descriptors a network card gets.
type restoredNet struct {
	ID     string `json:"id"`
	NumFDs int    `json:"num_fds"`
}

// restore makes a paused machine of what is in dir; file is the tap's descriptor, or negative.
func (c *client) restore(ctx context.Context, dir string, file int) error {
	request := struct {
		Source string        `json:"source_url"`
		Nets   []restoredNet `json:"net_fds,omitempty"`
	}{Source: "file://" + dir}
	if file < 0 {
		return c.put(ctx, "vm.restore", request)
	}
	request.Nets = []restoredNet{{ID: netID, NumFDs: 1}}
	return c.putFiles(ctx, "vm.restore", request, file)
}

// What counters show that have no sample yet: something near 2^64, and as an average, which is kept in parts of 10000,
// less of it.
const (
	noSample  = 1 << 60
	noAverage = (1<<64 - 1) / 10_000
)

// counters returns those of all devices that have a value, by device and name.
func (c *client) counters(ctx context.Context) (map[string]map[string]int64, error) {
	var raw map[string]map[string]uint64
	if err := c.call(ctx, http.MethodGet, "vm.counters", nil, nil, &raw); err != nil {
		return nil, err
	}
	known := make(map[string]map[string]int64, len(raw))
	for device, values := range raw {
		known[device] = make(map[string]int64, len(values))
		for name, v := range values {
			if v <= noSample && v != noAverage {
				known[device][name] = int64(v)
			}
		}
	}
	return known, nil
}

// shutdown destroys the machine; its configuration stays.
func (c *client) shutdown(ctx context.Context) error { return c.put(ctx, "vm.shutdown", nil) }

// remove destroys the machine and its configuration.
func (c *client) remove(ctx context.Context) error { return c.put(ctx, "vm.delete", nil) }

// shutdownVMM ends the process.
func (c *client) shutdownVMM(ctx context.Context) error { return c.put(ctx, "vmm.shutdown", nil) }
