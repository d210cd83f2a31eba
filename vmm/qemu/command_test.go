package qemu

import (
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/ephemeral-run/ephemeral/images"
	"github.com/ephemeral-run/ephemeral/vmm"
)

func testSpec() vmm.Spec {
	return vmm.Spec{
		ID: "0123456789ab", Dir: "/machines/0123456789ab", Shape: vmm.Shape{VCPUs: 2, MemoryMiB: 256},
		Image: images.Image{Kernel: "/img/vmlinuz", Initramfs: "/img/initramfs", RootFS: "/img/root,fs"},
		RAM:   "/templates/new/ram", Launcher: nil,
	}
}

// devices are the options that make devices, which a clone must have like its template.
func devices(args []string) []string {
	var found []string
	for i, arg := range args {
		switch arg {
		case "-device", "-M", "-smp", "-m", "-cpu", "-global":
			found = append(found, arg+" "+args[i+1])
		}
	}
	return found
}

func lines(t *testing.T, d *Driver, s vmm.Spec) (boot, restore command) {
	t.Helper()
	d.boardArgs(&boot, s, os.Stdin, os.Stdout)
	d.bootArgs(&boot, s)
	d.boardArgs(&restore, s, os.Stdin, os.Stdout)
	d.restoreArgs(&restore, s, "/templates/key/ram", "linuxboot_dma.bin")
	return boot, restore
}

func TestClonesHaveTheDevicesOfTemplates(t *testing.T) {
	mac, err := net.ParseMAC("02:00:00:00:00:01")
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		config Config
		kvm    bool
		nic    *vmm.NIC
	}{
		"plain":       {Config{TBSize: 64, VMGenID: true}, false, nil},
		"kvm":         {Config{TBSize: 64, VMGenID: true}, true, nil},
		"console":     {Config{TBSize: 64, Console: true}, false, nil},
		"tap by file": {Config{TBSize: 64, VMGenID: true}, false, &vmm.NIC{Tap: "eph0", MAC: mac, File: os.Stderr}},
		"tap by name": {Config{TBSize: 64, VMGenID: true}, false, &vmm.NIC{Tap: "eph0", MAC: mac}},
	} {
		t.Run(name, func(t *testing.T) {
			s := testSpec()
			s.NIC = c.nic
			d := &Driver{config: c.config, path: "/usr/bin/qemu", kvm: c.kvm, release: release{7, 2}}
			boot, restore := lines(t, d, s)
			if a, b := devices(boot.args), devices(restore.args); !slices.Equal(a, b) {
				t.Errorf("booted:\n%s\nrestored:\n%s", strings.Join(a, "\n"), strings.Join(b, "\n"))
			}
			for _, args := range [][]string{boot.args, restore.args} {
				all := strings.Join(args, " ")
				if !strings.Contains(all, "file=/img/root,,fs") {
					t.Error("a comma in a path is not escaped")
				}
				if got := strings.Contains(all, "vmgenid"); got != c.config.VMGenID {
					t.Errorf("vmgenid: %t", got)
				}
				if got := strings.Contains(all, "-accel kvm -cpu host"); got != c.kvm {
					t.Errorf("kvm: %t", got)
				}
				for _, must := range []string{"-sandbox on,", "spawn=deny", "-no-reboot", "-nodefaults", "-no-user-config", "panic=exit-failure", "ephemeral-" + s.ID} {
					if !strings.Contains(all, must) {
						t.Errorf("no %s", must)
					}
				}
			}
		})
	}
}

func TestMemoryIsSharedByTemplatesOnly(t *testing.T) {
	for name, c := range map[string]struct {
		release  release
		readOnly bool
	}{"7.2": {release{7, 2}, false}, "8.2": {release{8, 2}, true}, "10.0": {release{10, 0}, true}} {
		t.Run(name, func(t *testing.T) {
			boot, restore := lines(t, &Driver{config: Config{TBSize: 64}, release: c.release}, testSpec())
			if all := strings.Join(boot.args, " "); !strings.Contains(all, "share=on,size=256M,mem-path=/templates/new/ram") {
				t.Errorf("template: %s", all)
			}
			all := strings.Join(restore.args, " ")
			if !strings.Contains(all, "share=off,size=256M,mem-path=/templates/key/ram") || strings.Contains(all, "share=on") {
				t.Errorf("clone: %s", all)
			}
			if got := strings.Contains(all, "readonly=on,rom=off"); got != c.readOnly {
				t.Errorf("clone opens its memory read-only: %t", got)
			}
			if strings.Contains(all, "-kernel") || strings.Contains(all, "-initrd") {
				t.Error("a clone loads the kernel once more")
			}
			if !slices.Contains(restore.args, "-S") {
				t.Error("a clone would run at once")
			}
		})
	}
}

func TestInheritedNumbers(t *testing.T) {
	var c command
	for i := range 3 {
		if got := c.inherit(os.Stdin); got != 3+i {
			t.Errorf("descriptor %d is %d", i, got)
		}
	}
}

func TestLaunchable(t *testing.T) {
	d := &Driver{path: "/usr/bin/qemu", kvm: true, data: []string{"/usr/share/qemu"}}
	s := testSpec()
	s.NIC = &vmm.NIC{Tap: "eph0"}
	got := d.launchable(&command{}, s, []string{"/img/root"}, []string{"/templates/new"})
	if !slices.Equal(got.ReadOnly, []string{"/usr/bin/qemu", "/usr/share/qemu", "/img/root"}) {
		t.Errorf("read-only %q", got.ReadOnly)
	}
	if !slices.Equal(got.Writable, []string{s.Dir, "/templates/new"}) {
		t.Errorf("writable %q", got.Writable)
	}
	if !slices.Equal(got.Devices, []string{"/dev/kvm", "/dev/net/tun"}) {
		t.Errorf("devices %q", got.Devices)
	}
}

func TestOptionROM(t *testing.T) {
	for content, want := range map[string]string{"\x7fELF\x02\x01": "pvh.bin", "MZ\xea\x07\x00": "linuxboot_dma.bin", "MZ": ""} {
		path := filepath.Join(t.TempDir(), "kernel")
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
		got, err := optionROM(path)
		if got != want || (err == nil) != (want != "") {
			t.Errorf("%q: %q, %v", content, got, err)
		}
	}
}
