package e2e

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cavaliergopher/cpio"
)

// deathNote is the name of a file in a run's directory at which a mortal agent dies.
const deathNote = "agent-dies"

// mortality is what a mortal agent does beside its work. The kernel gives no signal to the first process of a machine that
// this did not ask for, so nobody in there could kill it.
const mortality = `package main

import (
	"os"
	"path/filepath"
	"time"
)

func init() {
	go func() {
		for ; ; time.Sleep(30 * time.Millisecond) {
			if notes, _ := filepath.Glob("/tmp/ephemeral-run-*/scratch/` + deathNote + `"); len(notes) > 0 {
				os.Exit(137)
			}
		}
	}()
}
`

// mortalImage makes the tests' image, with an agent that dies when a run's directory has a file named by deathNote, in dir.
func mortalImage(t *testing.T, dir string) {
	t.Helper()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	work := t.TempDir()
	file, err := filepath.Abs("../../cmd/guestagent/mortality.go")
	must(err)
	source, overlay, program := filepath.Join(work, "mortality.go"), filepath.Join(work, "overlay.json"), filepath.Join(work, "init")
	replace, err := json.Marshal(map[string]any{"Replace": map[string]string{file: source}})
	must(err)
	must(os.WriteFile(source, []byte(mortality), 0o644))
	must(os.WriteFile(overlay, replace, 0o644))
	build := exec.CommandContext(t.Context(), "go", "build", "-buildvcs=false", "-ldflags=-s -w", "-overlay", overlay, "-o", program, "../../cmd/guestagent")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build the mortal agent: %v\n%s", err, out)
	}
	agent, err := os.ReadFile(program)
	must(err)
	changedImage(t, dir, map[string]func(old []byte) []byte{"initramfs": func(old []byte) []byte {
		all := bytes.NewBuffer(old) // a later archive's files replace an earlier one's
		all.Write(make([]byte, (4-len(old)%4)%4))
		w := cpio.NewWriter(all)
		must(w.WriteHeader(&cpio.Header{Name: "init", Mode: cpio.TypeReg | 0o755, Size: int64(len(agent))}))
		_, err := w.Write(agent)
		must(err)
		must(w.Close())
		return all.Bytes()
	}})
}

// brokenImage links to a copy of the tests' image that fits its manifest but has no kernel that boots, and tells where the
// whole one is.
func brokenImage(t *testing.T, link string) (whole string) {
	t.Helper()
	whole = changedImage(t, link+"-broken", map[string]func([]byte) []byte{"vmlinuz": func([]byte) []byte {
		return []byte(strings.Repeat("no kernel at all\n", 1000))
	}})
	if err := os.Symlink(link+"-broken", link); err != nil {
		t.Fatal(err)
	}
	return whole
}
