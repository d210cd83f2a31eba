package main

import (
	"errors"
	"io"
	"os"
	"strings"
	"testing"

	"github.com/creack/pty"
)

func TestProgressIsLinesInAPipe(t *testing.T) {
	var out strings.Builder
	p := newProgress(&out, buildSteps)
	p.tell("installing Debian bookworm")
	p.tell("writing initramfs")
	p.close()
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	if len(lines) != 2 || !strings.HasSuffix(lines[0], "s  installing Debian bookworm") || strings.ContainsAny(out.String(), "\r\x1b") {
		t.Errorf("%q", out.String())
	}
}

func TestProgressIsABarOnATerminal(t *testing.T) {
	slave, read := terminal(t)
	p := newProgress(slave, buildSteps)
	p.tell("installing Debian bookworm")
	p.tell("a program says \x1b[2J\x07 this " + strings.Repeat("x", 200))
	p.tell("writing initramfs")
	p.close()
	out := read()
	for _, want := range []string{"20%", "80%", "installing Debian", "writing initramfs", "\r"} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in %q", want, out)
		}
	}
	for _, bad := range []string{"\x1b[2J", "\x07", "\n", strings.Repeat("x", 80)} {
		if strings.Contains(out, bad) {
			t.Errorf("%q in %q", bad, out)
		}
	}
}

// terminal is a terminal to write to; read closes it and returns what it was given.
func terminal(t *testing.T) (slave *os.File, read func() string) {
	t.Helper()
	t.Setenv("TERM", "xterm")
	master, slave, err := pty.Open()
	if err != nil {
		t.Fatal(err)
	}
	if err := pty.Setsize(slave, &pty.Winsize{Rows: 24, Cols: 80}); err != nil {
		t.Fatal(err)
	}
	seen := make(chan string, 1)
	go func() {
		all, _ := io.ReadAll(master) // ends with an error when the other side is closed
		seen <- string(all)
	}()
	t.Cleanup(func() { _ = errors.Join(slave.Close(), master.Close()) })
	return slave, func() string {
		if err := slave.Close(); err != nil {
			t.Fatal(err)
		}
		return <-seen
	}
}

func TestTemplatesHaveABarBelowTheLog(t *testing.T) {
	slave, read := terminal(t)
	c := &console{out: slave}
	c.template("base-1x512", "booting")
	if _, err := c.Write([]byte("a line of the log\n")); err != nil {
		t.Fatal(err)
	}
	c.template("base-1x512", "warming the interpreters")
	c.template("base-1x512", "made in 9.0 s")
	if _, err := c.Write([]byte("the last line\n")); err != nil {
		t.Fatal(err)
	}
	out := read()
	for _, want := range []string{"booting", "warming the interpreters", "50%"} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in %q", want, out)
		}
	}
	for _, line := range []string{"a line of the log\r\n", "the last line\r\n"} {
		i := strings.Index(out, line)
		if i < 0 || !strings.HasSuffix(strings.TrimRight(out[:i], " "), "\r") && !strings.HasSuffix(out[:i], "\x1b[K") {
			t.Errorf("%q does not stand on a line of its own in %q", line, out)
		}
	}
	if i := strings.Index(out, "a line of the log"); !strings.Contains(out[i:], "booting") {
		t.Errorf("the bar is not below the log: %q", out)
	}
	if i := strings.Index(out, "the last line"); strings.Contains(out[i:], "%") {
		t.Errorf("there is a bar of nothing: %q", out)
	}
}

func TestTemplatesInAPipe(t *testing.T) {
	var out strings.Builder
	c := &console{out: &out}
	c.template("base-1x512", "booting")
	if _, err := c.Write([]byte("a line\n")); err != nil || out.String() != "a line\n" {
		t.Errorf("%q, %v", out.String(), err)
	}
}

// TestStepsAreTold holds the bars' steps to what the work says.
func TestStepsAreTold(t *testing.T) {
	for _, c := range []struct {
		steps, files []string
	}{
		{buildSteps, []string{"images/build.go", "images/rootfs.go", "images/container.go"}},
		{append(templateSteps, templateEnds...), []string{"vmm/provision/template.go", "vmm/provision/keeper.go"}},
	} {
		var source strings.Builder
		for _, name := range c.files {
			b, err := os.ReadFile("../../" + name)
			if err != nil {
				t.Fatal(err)
			}
			source.Write(b)
		}
		for _, s := range c.steps {
			if !strings.Contains(source.String(), `"`+s) {
				t.Errorf("nothing in %v tells %q", c.files, s)
			}
		}
	}
}
