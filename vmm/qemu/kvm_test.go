package qemu

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const cpuinfo = "processor\t: 0\nmodel name\t: Test CPU\nflags\t\t: fpu %s sse\n\nprocessor\t: 1\nmodel name\t: Other\nflags\t\t: svm\n"

func TestUsable(t *testing.T) {
	write := func(t *testing.T, root, name, content string) {
		t.Helper()
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for name, c := range map[string]struct {
		files  map[string]string
		reason string // part of it; empty: usable
	}{
		"intel":     {map[string]string{"dev/kvm": "", "proc/cpuinfo": strings.Replace(cpuinfo, "%s", "vmx", 1)}, ""},
		"amd":       {map[string]string{"dev/kvm": "", "proc/cpuinfo": strings.Replace(cpuinfo, "%s", "svm", 1)}, ""},
		"no device": {map[string]string{"proc/cpuinfo": strings.Replace(cpuinfo, "%s", "svm", 1)}, "there is no /dev/kvm"},
		"no feature": {
			map[string]string{"dev/kvm": "", "proc/cpuinfo": strings.Replace(cpuinfo, "%s", "vmxnot", 1)}, "neither vmx nor svm",
		},
		"pvm": {
			map[string]string{"dev/kvm": "", "proc/cpuinfo": strings.Replace(cpuinfo, "%s", "svm", 1), "sys/module/kvm_pvm/initstate": "live"},
			"kvm_pvm",
		},
		"no cpuinfo": {map[string]string{"dev/kvm": ""}, "features are unknown"},
		"odd":        {map[string]string{"dev/kvm": "", "proc/cpuinfo": "nothing here"}, "features are unknown"},
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			for file, content := range c.files {
				write(t, root, file, content)
			}
			ok, reason := usable(root)
			if ok != (c.reason == "") || !strings.Contains(reason, c.reason) {
				t.Errorf("usable %t, reason %q, want %q", ok, reason, c.reason)
			}
		})
	}
}

func TestHostCPU(t *testing.T) {
	path := filepath.Join(t.TempDir(), "cpuinfo")
	name := func(flags string) string {
		t.Helper()
		if err := os.WriteFile(path, []byte(strings.Replace(cpuinfo, "%s", flags, 1)), 0o644); err != nil {
			t.Fatal(err)
		}
		got, err := hostCPU(path)
		if err != nil {
			t.Fatal(err)
		}
		return got
	}
	if a, b := name("svm"), name("svm avx"); a == b {
		t.Errorf("CPUs with different features are both %q", a)
	}
	if got := name("svm"); !strings.HasPrefix(got, "kvm Test CPU ") {
		t.Errorf("CPU %q", got)
	}
}
