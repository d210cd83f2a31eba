package prepare

import (
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"
)

// recorder is a system that notes what is done to it.
type recorder struct {
	calls []string
	fail  string
}

func (r *recorder) do(name string) error {
	r.calls = append(r.calls, name)
	if name == r.fail {
		return errors.New("no")
	}
	return nil
}

func (r *recorder) SetClock(time.Time) error          { return r.do("clock") }
func (r *recorder) StepClock(time.Duration) error     { return r.do("step") }
func (r *recorder) Reseed([]byte) error               { return r.do("reseed") }
func (r *recorder) SetNames(string, string) error     { return r.do("names") }
func (r *recorder) SetNetwork(mac, addr string) error { return r.do("network") }

func identity() Identity {
	return Identity{
		Clock: time.Now(), Entropy: make([]byte, 64), Hostname: "m-1", MachineID: strings.Repeat("0a", 16),
		MAC: "02:00:00:00:00:01", Address: "10.1.2.3/24",
	}
}

func TestPrepareOrder(t *testing.T) {
	for _, c := range []struct {
		fail     string
		step     time.Duration
		calls    []string
		reseeded bool
	}{
		{calls: []string{"clock", "reseed", "names", "network"}, reseeded: true},
		{step: time.Second, calls: []string{"step", "reseed", "names", "network"}, reseeded: true},
		{fail: "clock", calls: []string{"clock"}},
		{fail: "reseed", calls: []string{"clock", "reseed"}},
		{fail: "names", calls: []string{"clock", "reseed", "names"}, reseeded: true},
		{fail: "network", calls: []string{"clock", "reseed", "names", "network"}, reseeded: true},
	} {
		r := &recorder{fail: c.fail}
		i := identity()
		i.Step = c.step
		dir := t.TempDir()
		scratch, reseeded, err := Prepare(r, i, dir, os.Getuid(), os.Getgid())
		if !reflect.DeepEqual(r.calls, c.calls) || reseeded != c.reseeded || (err != nil) != (c.fail != "") || (scratch != "") != (c.fail == "") {
			t.Errorf("%s: %v, %v, %q, %v", c.fail, r.calls, reseeded, scratch, err)
		}
		if entries, _ := os.ReadDir(dir); (len(entries) == 1) != (c.fail == "") {
			t.Errorf("%s: made %v", c.fail, entries)
		}
	}
}

func TestCheck(t *testing.T) {
	if err := identity().Check(); err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]func(*Identity){
		"no clock":         func(i *Identity) { i.Clock = time.Time{} },
		"clock of doom":    func(i *Identity) { i.Clock = time.Unix(1<<40, 0) },
		"little entropy":   func(i *Identity) { i.Entropy = make([]byte, 31) },
		"much entropy":     func(i *Identity) { i.Entropy = make([]byte, 257) },
		"no hostname":      func(i *Identity) { i.Hostname = "" },
		"long hostname":    func(i *Identity) { i.Hostname = strings.Repeat("a", 64) },
		"domain":           func(i *Identity) { i.Hostname = "a.b" },
		"newline":          func(i *Identity) { i.Hostname = "a\n" },
		"machine id":       func(i *Identity) { i.MachineID = strings.Repeat("0A", 16) },
		"long machine id":  func(i *Identity) { i.MachineID += "\n" },
		"mac":              func(i *Identity) { i.MAC = "02:00:00:00:00" },
		"long mac":         func(i *Identity) { i.MAC = "02:00:00:00:00:01:02:03" },
		"multicast mac":    func(i *Identity) { i.MAC = "03:00:00:00:00:01" },
		"address":          func(i *Identity) { i.Address = "10.0.0.1" },
		"address of space": func(i *Identity) { i.Address = "10.0.0.1/24 " },
	} {
		i := identity()
		change(&i)
		r := &recorder{}
		if _, reseeded, err := Prepare(r, i, t.TempDir(), 0, 0); err == nil || reseeded || len(r.calls) > 0 {
			t.Errorf("%s: %v, %v", name, err, r.calls)
		}
	}
}

func TestScratch(t *testing.T) {
	dir := t.TempDir()
	seen := map[string]bool{}
	for range 500 {
		scratch, err := makeScratch(dir, 1000, 1000)
		if err != nil {
			t.Fatal(err)
		}
		if name, ok := strings.CutPrefix(scratch, dir); !ok || !regexp.MustCompile(`^/ephemeral-run-[A-Za-z0-9]{6}/scratch$`).MatchString(name) || seen[scratch] {
			t.Fatalf("scratch %q", scratch)
		}
		seen[scratch] = true
		inner, err := os.Stat(scratch)
		if err != nil {
			t.Fatal(err)
		}
		outer, err := os.Stat(filepath.Dir(scratch))
		if err != nil {
			t.Fatal(err)
		}
		if inner.Sys().(*syscall.Stat_t).Uid != 1000 || outer.Sys().(*syscall.Stat_t).Uid != 0 {
			t.Fatal("wrong owner")
		}
	}
}
