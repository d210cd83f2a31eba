// Package chfake is a Cloud Hypervisor that makes no machines: a strict stand-in for tests, as a process of its own. It
// serves the API with the answers of version 53, writes events and snapshot directories like it, and its guest is a real
// agent that is reached over vsock's socket. It needs root, and runs its guest's commands in namespaces of their own, where
// /run and /tmp are the guest's.
//
// A test binary calls Main first thing in TestMain, and Install for a program to give to the driver.
package chfake

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Options say how a fake behaves.
type Options struct {
	Version string  `json:"version"` // as --version prints it; empty: "v53.0"
	Answers string  `json:"answers"` // the version that vmm.ping tells; empty: Version
	Faults  []Fault `json:"faults"`
	NoAPI   bool    `json:"no_api"` // the API is never served
	Cgroup  string  `json:"cgroup"` // set by Install
}

// Kinds of faults.
const (
	Slow    = "slow"    // answer after Milliseconds
	Refuse  = "refuse"  // answer with Status and Causes, do nothing
	Crash   = "crash"   // the process is killed before it answers
	Half    = "half"    // half an answer, then the end of the connection; it was carried out
	Hang    = "hang"    // no answer
	Garbage = "garbage" // an answer that is no HTTP
	Gap     = "gap"     // an event is cut in the middle
	Exit    = "exit"    // the process ends with exit code 0 and an error in its log
)

// Fault is what goes wrong with a call.
type Fault struct {
	Call         string   `json:"call"` // e.g. "vm.restore"; "" is every call
	Kind         string   `json:"kind"`
	Milliseconds int      `json:"milliseconds"`
	Status       int      `json:"status"`
	Causes       []string `json:"causes"`
}

// optionsVariable names the file with a process's options, and makes a test binary a fake.
const optionsVariable = "EPHEMERAL_CHFAKE_OPTIONS"

// Main is the fake, if this process is to be one. It does not return then.
func Main() {
	path := os.Getenv(optionsVariable)
	if path == "" {
		return
	}
	err := run(path, os.Args[1:])
	fmt.Fprintf(os.Stderr, "Error: Cloud Hypervisor exited with the following chain of errors:\n  0: %v\n", err)
	os.Exit(1)
}

// hostRoot is where a fake finds the files of the host, whose /run and /tmp it does not see any more.
const hostRoot = "/run/hostroot"

// script starts the fake: %s are the version, the options' path and the test binary.
const script = `#!/bin/sh
if [ "$1" = --version ]; then echo "cloud-hypervisor %s"; exit 0; fi
export %s='%s'
exec unshare --mount --propagation private --pid --fork --kill-child sh -c '
mount -t tmpfs tmpfs /run && mkdir -p ` + hostRoot + ` && mount --rbind / ` + hostRoot + ` && mount -t tmpfs tmpfs /tmp &&
mount -t proc proc /proc && { [ ! -e /proc/sysrq-trigger ] || mount --bind /dev/null /proc/sysrq-trigger; } || exit 1
exec ` + hostRoot + `"$0" "$@"' '%s' "$@"
`

// Install makes a program of the fake for the length of a test, and returns its path.
func Install(t testing.TB, o Options) string {
	t.Helper()
	if o.Version == "" {
		o.Version = "v53.0"
	}
	if o.Answers == "" {
		o.Answers = o.Version
	}
	dir := t.TempDir()
	hierarchy, err := cgroups()
	if err != nil {
		t.Fatal(err)
	}
	o.Cgroup, err = os.MkdirTemp(hierarchy, "chfake-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { removeCgroups(o.Cgroup) })
	content, err := json.Marshal(o)
	if err != nil {
		t.Fatal(err)
	}
	options := filepath.Join(dir, "options.json")
	program := filepath.Join(dir, "cloud-hypervisor")
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	text := fmt.Sprintf(script, o.Version, optionsVariable, options, self)
	if err := errors.Join(os.WriteFile(options, content, 0o600), os.WriteFile(program, []byte(text), 0o755)); err != nil {
		t.Fatal(err)
	}
	return program
}

// cgroups is the version 2 hierarchy.
func cgroups() (string, error) {
	for _, dir := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/unified"} {
		if _, err := os.Stat(dir + "/cgroup.controllers"); err == nil {
			return dir, nil
		}
	}
	return "", errors.New("no version 2 cgroup hierarchy is mounted")
}

// removeCgroups removes what killed fakes left, from the leaves up.
func removeCgroups(root string) {
	var all []string
	_ = filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() {
			all = append(all, path)
		}
		return nil
	})
	for i := len(all) - 1; i >= 0; i-- {
		_ = os.Remove(all[i])
	}
}

// host is where a file of the host lies for the fake.
func host(path string) string {
	if !strings.HasPrefix(path, "/") {
		return path // in the working directory, which was kept
	}
	return hostRoot + path
}
