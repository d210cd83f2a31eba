package main

import (
	"reflect"
	"regexp"
	"strings"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/ephemeral-run/ephemeral/run"
)

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){"ephemeral": main, "record-run": recordRun, "free-address": freeAddress})
}

func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir: "testdata/script",
		Setup: func(env *testscript.Env) error {
			env.Setenv("EPHEMERAL_DATA_DIR", env.WorkDir+"/data")
			return nil
		},
	})
}

// TestEveryVariableIsExplained holds every setting to a name, a meaning and a place of its own.
func TestEveryVariableIsExplained(t *testing.T) {
	name := regexp.MustCompile(`^(EPHEMERAL|OTEL)_[A-Z0-9_]+$`)
	seen := map[string]bool{}
	for _, v := range variables(reflect.TypeFor[settings]()) {
		if !name.MatchString(v.Name) || v.Help == "" || seen[v.Name] {
			t.Errorf("variable %+v: bad name, no help, or declared twice", v)
		}
		seen[v.Name] = true
	}
	if len(seen) < 50 {
		t.Errorf("only %d variables found", len(seen))
	}
}

// TestTimelineCannotSteerATerminal shows what a machine may print.
func TestTimelineCannotSteerATerminal(t *testing.T) {
	hostile := "\x1b[2J\x1b]0;title\x07 \u202eevil\u2066 \r\b\x00 \u009b31m ok\n"
	var out strings.Builder
	printEvent(&out, run.Event{Type: run.EventShell, Data: run.ShellData{Command: hostile, Outcome: "exited"}})
	printEnd(&out, run.Run{State: run.Failed, Error: &run.Error{Code: "x", Detail: hostile}, Result: &run.Result{
		Output: hostile, Stdout: &run.Stream{Content: hostile}, Stderr: &run.Stream{Content: hostile}}})
	for _, r := range out.String() {
		if r != '\n' && r != '\t' && (r < ' ' || r >= 0x7f && r < 0xa0 || r >= 0x202a && r <= 0x202e || r >= 0x2066 && r <= 0x2069) {
			t.Fatalf("%U reached the terminal: %q", r, out.String())
		}
	}
	if strings.Count(out.String(), "ok") != 5 {
		t.Errorf("text was lost: %q", out.String())
	}
}

func TestOneLine(t *testing.T) {
	tests := map[string]string{
		"":                             "",
		"a\n b\t c":                    "a b c",
		strings.Repeat("é", maxLine):   strings.Repeat("é", maxLine),
		strings.Repeat("é", maxLine+1): strings.Repeat("é", maxLine-1) + "…",
	}
	for in, want := range tests {
		if got := oneLine(in); got != want {
			t.Errorf("oneLine(%q) = %q, want %q", in, got, want)
		}
	}
}

func TestExitOf(t *testing.T) {
	code := func(n int) *run.Result { return &run.Result{ExitCode: &n} }
	tests := []struct {
		r    run.Run
		want int
	}{
		{run.Run{State: run.Succeeded}, 0},
		{run.Run{State: run.Succeeded, Result: code(0)}, 0},
		{run.Run{State: run.Succeeded, Result: code(7)}, 7},
		{run.Run{State: run.TimedOut, Result: code(0)}, 1},
		{run.Run{State: run.Failed}, 1},
	}
	for _, tt := range tests {
		if got := exitOf(tt.r); got != tt.want {
			t.Errorf("exitOf(%+v) = %d, want %d", tt.r, got, tt.want)
		}
	}
}
