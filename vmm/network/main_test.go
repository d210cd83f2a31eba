package network

import (
	"crypto/rand"
	"encoding/hex"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"go.uber.org/goleak"
)

// helperVariable makes the test binary play a node that is going to be killed; see TestNodeKilled.
const helperVariable = "NETWORK_TEST_HELPER"

func TestMain(m *testing.M) {
	if node := os.Getenv(helperVariable); node != "" {
		helper(node)
		return
	}
	goleak.VerifyTestMain(m)
}

func randomHex(t testing.TB) string {
	t.Helper()
	b := make([]byte, 6)
	if _, err := rand.Read(b); err != nil {
		t.Fatal(err)
	}
	return hex.EncodeToString(b)
}

// open opens the network of a node that only one test has. After the test nothing of it may be left.
func open(t testing.TB, node string) *Network {
	t.Helper()
	if os.Getuid() != 0 {
		t.Fatal("this test needs root: it makes network namespaces")
	}
	n, err := Open(t.Context(), node)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.Close(); err != nil {
			t.Error(err)
		}
		if _, err := os.Stat(filepath.Join(directory, n.Name())); !os.IsNotExist(err) {
			t.Errorf("namespace is there after Close: %v", err)
		}
	})
	return n
}

func newTap(t testing.TB, n *Network) *Tap {
	t.Helper()
	tap, err := n.NewTap(randomHex(t), 20000)
	if err != nil {
		t.Fatal(err)
	}
	return tap
}

// inside runs a command in the namespace and returns its output.
func inside(t testing.TB, n *Network, name string, args ...string) string {
	t.Helper()
	var out []byte
	err := n.Do(func() (err error) {
		out, err = exec.Command(name, args...).CombinedOutput()
		return err
	})
	if err != nil {
		t.Fatalf("%s %s: %v: %s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}

// normal is a text without trailing space and empty lines.
func normal(text string) []string {
	var lines []string
	for line := range strings.Lines(text) {
		if line = strings.TrimRight(line, " \t\n"); line != "" {
			lines = append(lines, strings.ReplaceAll(line, "\t", "    "))
		}
	}
	return lines
}
