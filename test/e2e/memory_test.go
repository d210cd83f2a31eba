package e2e

import (
	"bytes"
	"os/exec"
	"strings"
	"testing"
)

// TestTooLittleMemoryIsRefused: a server whose machines could not boot does not start, and names the least memory.
func TestTooLittleMemoryIsRefused(t *testing.T) {
	for _, setting := range []string{"EPHEMERAL_MACHINE_MEMORY_MIB=96", "EPHEMERAL_IMAGES=base:64"} {
		name, _, _ := strings.Cut(setting, "=")
		s, err := newServer(t.TempDir(), setting)
		if err != nil {
			t.Fatal(err)
		}
		for _, command := range []string{"serve", "doctor"} {
			cmd := exec.CommandContext(t.Context(), binaries.ephemeral, command)
			cmd.Env = s.env
			out, err := cmd.CombinedOutput()
			if err == nil || !bytes.Contains(out, []byte("they need at least 104")) || !bytes.Contains(out, []byte(name)) {
				t.Errorf("%s with %s: %v\n%s", command, setting, err, out)
			}
		}
	}
}
