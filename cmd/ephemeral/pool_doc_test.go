package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
)

const tuningDoc = "../../docs/pool-tuning.md"

var blocks = regexp.MustCompile("(?s)```sh\n(.*?)```\n(?:```text\n(.*?)```\n)?")

// TestPoolTuningDoc runs the commands of the guide as a testscript, one after the other, and compares what they print and
// draw with what the guide shows.
func TestPoolTuningDoc(t *testing.T) {
	doc, err := os.ReadFile(tuningDoc)
	if err != nil {
		t.Fatal(err)
	}
	var script, files strings.Builder
	all := blocks.FindAllStringSubmatch(string(doc), -1)
	if len(all) < 6 {
		t.Fatalf("only %d commands found", len(all))
	}
	for i, b := range all {
		fmt.Fprintf(&script, "exec %s", b[1])
		if b[2] != "" {
			fmt.Fprintf(&script, "cmp stdout shown%d\n", i)
			fmt.Fprintf(&files, "-- shown%d --\n%s", i, b[2])
		}
	}
	script.WriteString("exists plots/waits.svg\n")
	for _, name := range []string{"trade-off.svg", "pool.svg"} {
		picture, err := filepath.Abs(filepath.Join(filepath.Dir(tuningDoc), "pool-tuning", name))
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(&script, "cmp plots/%s %s\n", name, picture)
	}
	dir := t.TempDir()
	var txtar bytes.Buffer
	txtar.WriteString(script.String() + files.String())
	if err := os.WriteFile(filepath.Join(dir, "tuning.txtar"), txtar.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	testscript.Run(t, testscript.Params{
		Dir: dir,
		Setup: func(env *testscript.Env) error {
			env.Setenv("EPHEMERAL_DATA_DIR", env.WorkDir+"/data")
			return nil
		},
	})
}
