// Command guestagent is the first process of a machine: it brings the machine up and then does what the host asks.
package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/user"
	"strconv"
	"time"

	"github.com/ephemeral-run/ephemeral/guestagent/boot"
	"github.com/ephemeral-run/ephemeral/guestagent/door"
	"github.com/ephemeral-run/ephemeral/guestagent/exec"
	"github.com/ephemeral-run/ephemeral/guestagent/prepare"
	"github.com/ephemeral-run/ephemeral/guestagent/proto"
	"github.com/ephemeral-run/ephemeral/guestagent/server"
	"github.com/ephemeral-run/ephemeral/guestagent/transport"
)

// version is set when the binary is linked.
var version = "dev"

const (
	commandsCgroup = boot.Cgroups + "/commands"
	commandPids    = 2048
	// serialTimeout bounds the wait for the serial port's driver.
	serialTimeout = 20 * time.Second
)

func main() {
	if os.Getpid() != 1 {
		fmt.Fprintf(os.Stderr, "guestagent %s: runs as the first process of a machine only\n", version)
		os.Exit(2)
	}
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	if err := run(log); err != nil {
		log.Error("agent failed", "error", err)
	}
	// The first process must not end, the kernel would panic. Without an agent the machine is of no use.
	if err := boot.PowerOff(); err != nil {
		log.Error("power off", "error", err)
	}
	select {}
}

func run(log *slog.Logger) error {
	if err := boot.Start(log); err != nil {
		return fmt.Errorf("boot: %w", err)
	}
	if err := os.WriteFile("/proc/self/oom_score_adj", []byte("-1000"), 0); err != nil {
		return fmt.Errorf("protect from out-of-memory: %w", err)
	}
	memory, err := boot.CommandMemory()
	if err != nil {
		return err
	}
	runner, err := exec.New(exec.Config{
		Cgroup: commandsCgroup, MemoryLimit: memory, PidsLimit: commandPids, Mounts: boot.Writable, OOMScoreAgent: "-1000", OOMScoreCommand: "500",
	}, exec.NewReaper())
	if err != nil {
		return err
	}
	kernel, err := prepare.NewKernel(boot.Interface)
	if err != nil {
		return err
	}
	way, err := connect(log)
	if err != nil {
		return err
	}
	accounts, err := lookUp("worker", "root")
	if err != nil {
		return err
	}
	listener, err := way.Listen()
	if err != nil {
		return err
	}
	agent := server.New(server.Config{
		Version: version, Runner: runner, System: kernel, TempDir: "/tmp",
		Accounts: accounts, Dial: way.Dial, DoorAddress: door.Address, AddHost: kernel.AddHost, PowerOff: boot.PowerOff, Log: log,
	})
	log.Info("agent ready", "version", version, "transport", way.Name())
	return agent.Serve(context.Background(), listener)
}

// connect takes vsock where the machine has it, the serial port otherwise.
func connect(log *slog.Logger) (transport.Transport, error) {
	way, vsockErr := transport.Vsock()
	if vsockErr == nil {
		return way, nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), serialTimeout)
	defer cancel()
	device, err := transport.FindPort(ctx, proto.SerialPort)
	if err != nil {
		return nil, fmt.Errorf("no way to the host: %w", errors.Join(vsockErr, err))
	}
	port, err := transport.OpenPort(device)
	if err != nil {
		return nil, err
	}
	return transport.NewSerial(port, log), nil
}

// lookUp reads users once, before the commands of a run can change the files that say who they are.
func lookUp(names ...string) (map[string]server.Account, error) {
	accounts := make(map[string]server.Account)
	for _, name := range names {
		a, err := account(name)
		if err != nil {
			return nil, err
		}
		accounts[name] = a
	}
	return accounts, nil
}

// account looks a user up in the image's files.
func account(name string) (server.Account, error) {
	found, err := user.Lookup(name)
	if err != nil {
		return server.Account{}, fmt.Errorf("look up user: %w", err)
	}
	groups, err := found.GroupIds()
	if err != nil {
		return server.Account{}, fmt.Errorf("look up groups: %w", err)
	}
	result := server.Account{Name: name, Home: found.HomeDir}
	for _, id := range []struct {
		text string
		to   *uint32
	}{{found.Uid, &result.UID}, {found.Gid, &result.GID}} {
		n, err := strconv.ParseUint(id.text, 10, 32)
		if err != nil {
			return server.Account{}, fmt.Errorf("look up user %s: %w", name, err)
		}
		*id.to = uint32(n)
	}
	for _, text := range groups {
		n, err := strconv.ParseUint(text, 10, 32)
		if err != nil {
			return server.Account{}, fmt.Errorf("look up groups of %s: %w", name, err)
		}
		result.Groups = append(result.Groups, uint32(n))
	}
	return result, nil
}
