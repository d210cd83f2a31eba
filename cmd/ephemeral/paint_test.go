package main

import (
	"os"
	"strings"
	"testing"

	"github.com/creack/pty"

	"github.com/ephemeral-run/ephemeral/run"
)

// TestColourIsForTerminals: a timeline has colours on a terminal alone, and there only while nobody asks for plain text.
func TestColourIsForTerminals(t *testing.T) {
	master, slave, err := pty.Open()
	if err != nil {
		t.Fatal(err)
	}
	defer master.Close()
	defer slave.Close()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	for name, c := range map[string]struct {
		out           *os.File
		noColor, term string
		want          bool
	}{
		"terminal":       {slave, "", "xterm-256color", true},
		"pipe":           {w, "", "xterm-256color", false},
		"NO_COLOR":       {slave, "1", "xterm-256color", false},
		"a dumb machine": {slave, "", "dumb", false},
	} {
		t.Setenv("NO_COLOR", c.noColor)
		t.Setenv("TERM", c.term)
		text := paintOn(c.out).event(run.EventType(run.Failed), "failed")
		if got := strings.Contains(text, "\x1b["); got != c.want || !strings.Contains(text, "failed") {
			t.Errorf("%s: %q", name, text)
		}
	}
}
