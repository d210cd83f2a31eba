package qemu

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ephemeral-run/ephemeral/vmm"
)

// program makes a program that answers like QEMU.
func program(t *testing.T, version string) string {
	t.Helper()
	dir := t.TempDir()
	path := filepath.Join(dir, "qemu")
	for _, name := range []string{"data", "more"} {
		if err := os.Mkdir(filepath.Join(dir, name), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	script := fmt.Sprintf("#!/bin/sh\ncase $1 in --version) echo '%s';; -L) cat <<.\n%s\n.\n;; *) exit 9;; esac\n", version,
		dir+"/data\nrelative\n"+dir+"/data/../more\n"+dir+"/not-installed\n"+path)
	if err := os.WriteFile(path, []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestNew(t *testing.T) {
	for name, c := range map[string]struct {
		version string
		change  func(*Config)
		want    string // part of the error; empty: none
	}{
		"7.2":          {"QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7)", nil, ""},
		"10":           {"QEMU emulator version 10.0.13 (Debian 1:10.0.13)", nil, ""},
		"old":          {"QEMU emulator version 7.1.0", nil, "older than 7.2"},
		"ancient":      {"QEMU emulator version 2.12.1", nil, "older than 7.2"},
		"other":        {"hello", nil, "no QEMU"},
		"missing":      {"", func(c *Config) { c.Path = "/nowhere/qemu" }, "EPHEMERAL_QEMU"},
		"accelerator":  {"QEMU emulator version 7.2.22", func(c *Config) { c.Accel = "hvf" }, "EPHEMERAL_QEMU_ACCEL"},
		"buffer":       {"QEMU emulator version 7.2.22", func(c *Config) { c.TBSize = 0 }, "EPHEMERAL_QEMU_TB_SIZE"},
		"buffer large": {"QEMU emulator version 7.2.22", func(c *Config) { c.TBSize = 1 << 20 }, "EPHEMERAL_QEMU_TB_SIZE"},
	} {
		t.Run(name, func(t *testing.T) {
			config := Config{Path: program(t, c.version), Accel: "tcg", TBSize: 64, VMGenID: true}
			if c.change != nil {
				c.change(&config)
			}
			d, err := New(config)
			if c.want != "" {
				if err == nil || !strings.Contains(err.Error(), c.want) {
					t.Fatalf("error %v, want %q", err, c.want)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if want := strings.TrimPrefix(c.version, "QEMU emulator version "); d.Version() != want {
				t.Errorf("version %q, want %q", d.Version(), want)
			}
			if d.Isolation() != vmm.Emulated || d.Name() != "qemu" {
				t.Errorf("isolation %q, name %q", d.Isolation(), d.Name())
			}
			dir := filepath.Dir(config.Path)
			if got := strings.Join(d.data, " "); got != dir+"/data "+dir+"/more" {
				t.Errorf("data directories %q", got)
			}
		})
	}
}

func TestCPUModelTellsWhatTemplatesShare(t *testing.T) {
	seen := make(map[string]Config)
	for _, c := range []Config{{VMGenID: true}, {}, {VMGenID: true, Console: true}, {Console: true}} {
		d := &Driver{config: c, cpu: "tcg max"}
		if other, taken := seen[d.CPUModel()]; taken {
			t.Errorf("%+v and %+v are both %q", c, other, d.CPUModel())
		}
		seen[d.CPUModel()] = c
	}
}

func TestRelease(t *testing.T) {
	for _, c := range []struct {
		have         release
		major, minor int
		want         bool
	}{
		{release{7, 2}, 7, 2, true}, {release{7, 1}, 7, 2, false}, {release{8, 0}, 7, 2, true},
		{release{8, 1}, 8, 2, false}, {release{10, 0}, 8, 2, true}, {release{8, 2}, 8, 2, true},
	} {
		if got := c.have.atLeast(c.major, c.minor); got != c.want {
			t.Errorf("%v at least %d.%d: %t", c.have, c.major, c.minor, got)
		}
	}
}
