package vmm

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestKVMUsable(t *testing.T) {
	for name, c := range map[string]struct {
		files  map[string]string
		usable bool
		reason string
	}{
		"none":      {nil, false, "no /dev/kvm"},
		"no flag":   {map[string]string{"dev/kvm": "", "proc/cpuinfo": "flags\t: fpu sse2\n"}, false, "neither vmx nor svm"},
		"no flags":  {map[string]string{"dev/kvm": "", "proc/cpuinfo": "model name\t: x\n"}, false, "has no flags"},
		"kvm_pvm":   {map[string]string{"dev/kvm": "", "proc/cpuinfo": "flags\t: vmx\n", "sys/module/kvm_pvm/x": ""}, false, "kvm_pvm"},
		"intel":     {map[string]string{"dev/kvm": "", "proc/cpuinfo": "flags\t: fpu vmx\n"}, true, ""},
		"amd":       {map[string]string{"dev/kvm": "", "proc/cpuinfo": "flags\t: fpu svm\n"}, true, ""},
		"directory": {map[string]string{"dev/kvm/x": ""}, false, "does not open"},
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			for path, content := range c.files {
				path = filepath.Join(root, path)
				if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			usable, reason := kvmUsable(root)
			if usable != c.usable || !strings.Contains(reason, c.reason) {
				t.Errorf("%t, %q", usable, reason)
			}
		})
	}
}

func TestHostCPU(t *testing.T) {
	path := filepath.Join(t.TempDir(), "cpuinfo")
	name := func(content string) (string, error) {
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		return hostCPU(path)
	}
	first, err := name("model name\t: Some CPU\nflags\t\t: a b\n")
	if err != nil || !strings.HasPrefix(first, "Some CPU ") {
		t.Fatalf("%q, %v", first, err)
	}
	if other, err := name("model name\t: Some CPU\nflags\t\t: a b c\n"); err != nil || other == first {
		t.Errorf("another CPU is %q, %v", other, err)
	}
	for _, bad := range []string{"", "model name\t: x\n", "flags\t: y\n"} {
		if got, err := name(bad); err == nil {
			t.Errorf("%q is CPU %q", bad, got)
		}
	}
}

func TestProcessStats(t *testing.T) {
	got, err := ProcessStats(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	if got.Pid != os.Getpid() || got.PrivateBytes < 1<<20 || got.PrivateBytes > 1<<34 || got.CPU < 0 {
		t.Errorf("%+v", got)
	}
	ended := exec.Command("true")
	if err := ended.Run(); err != nil {
		t.Fatal(err)
	}
	if _, err := ProcessStats(ended.Process.Pid); !errors.Is(err, ErrClosed) {
		t.Errorf("an ended process: %v", err)
	}
}

func TestPrivateBytes(t *testing.T) {
	got, err := privateBytes([]byte("Rss:  10 kB\nPrivate_Clean:   4 kB\nPrivate_Dirty:  8 kB\n"))
	if err != nil || got != 12<<10 {
		t.Errorf("%d, %v", got, err)
	}
	for _, bad := range []string{"", "Private_Clean: 4 kB\n", "Private_Clean: x kB\nPrivate_Dirty: 1 kB\n"} {
		if got, err := privateBytes([]byte(bad)); err == nil {
			t.Errorf("%q is %d", bad, got)
		}
	}
}

func TestCPUTime(t *testing.T) {
	got, err := cpuTime("7 (a ) b) S 1 2 3 4 5 6 7 8 9 10 150 50 0 0")
	if err != nil || got != 2*time.Second {
		t.Errorf("%v, %v", got, err)
	}
	for _, bad := range []string{"", "7 (a) S 1", "7 (a) S 1 2 3 4 5 6 7 8 9 10 x 50 0 0"} {
		if got, err := cpuTime(bad); err == nil {
			t.Errorf("%q is %v", bad, got)
		}
	}
}
