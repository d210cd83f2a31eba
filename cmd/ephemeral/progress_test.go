package main

import (
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
	t.Setenv("TERM", "xterm")
	master, slave, err := pty.Open()
	if err != nil {
		t.Fatal(err)
	}
	defer master.Close()
	if err := pty.Setsize(slave, &pty.Winsize{Rows: 24, Cols: 80}); err != nil {
		t.Fatal(err)
	}
	seen := make(chan string)
	go func() {
		all, _ := io.ReadAll(master) // ends with an error when the other side is closed
		seen <- string(all)
	}()
	p := newProgress(slave, buildSteps)
	p.tell("installing Debian bookworm")
	p.tell("a program says \x1b[2J\x07 this " + strings.Repeat("x", 200))
	p.tell("writing initramfs")
	p.close()
	if err := slave.Close(); err != nil {
		t.Fatal(err)
	}
	out := <-seen
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

// TestBuildStepsAreTold holds the bar's steps to what the build says.
func TestBuildStepsAreTold(t *testing.T) {
	var source strings.Builder
	for _, name := range []string{"build.go", "rootfs.go", "container.go"} {
		b, err := os.ReadFile("../../images/" + name)
		if err != nil {
			t.Fatal(err)
		}
		source.Write(b)
	}
	for _, s := range buildSteps {
		if !strings.Contains(source.String(), `"`+s) {
			t.Errorf("no build tells %q", s)
		}
	}
}
