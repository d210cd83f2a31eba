package provision

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/ephemeral-run/ephemeral/vmm"
)

func TestTemplateIsMadeInOrderAndReused(t *testing.T) {
	s := newStage()
	dir := dataDir(t)
	p := open(t, s, config(dir))
	img := image(t, dir)
	var told []string
	tmpl, err := p.Template(t.Context(), img, p.config.Shape(), func(s string) { told = append(told, s) })
	if err != nil {
		t.Fatal(err)
	}
	want := []string{
		"make jail", "make tap", "launch", "boot", "probe", "warm", "disconnect", "pause", "snapshot",
		"close machine", "close tap", "close jail",
	}
	if diff := cmp.Diff(want, s.events()); diff != "" {
		t.Errorf("what happened (-want +got):\n%s", diff)
	}
	if len(told) < 4 || !strings.HasPrefix(told[len(told)-1], "made in ") {
		t.Errorf("progress: %q", told)
	}
	if tmpl.Image != img || tmpl.Shape != p.config.Shape() || tmpl.Driver != "fake" || tmpl.Version != "7.2" || len(tmpl.Key) != 32 {
		t.Errorf("template: %+v", tmpl)
	}
	info, err := os.Stat(tmpl.RAM)
	if err != nil || info.Mode() != 0o444 || info.Size() != 64<<20 {
		t.Errorf("memory file: %v, %v", info, err)
	}
	if holes := sparse(t, tmpl.RAM); holes {
		t.Error("the memory file has holes")
	}
	again, err := open(t, s, config(dir)).Template(t.Context(), img, p.config.Shape(), nil)
	if err != nil || s.count("boot") != 1 {
		t.Errorf("it was not reused: %d boots, %v", s.count("boot"), err)
	}
	if again.Key != tmpl.Key || !again.MadeAt.Equal(tmpl.MadeAt) || again.Dir != tmpl.Dir {
		t.Errorf("reused as %+v, was %+v", again, tmpl)
	}
	s.empty(t, p)
}

func sparse(t *testing.T, path string) bool {
	t.Helper()
	used, size := diskUse(t, path)
	return used < size
}

func TestTemplateDependsOnAllThatItsClonesShare(t *testing.T) {
	s := newStage()
	p, tmpl := made(t, s)
	keys := map[string]string{tmpl.Key: "as it was"}
	for what, change := range map[string]func(*traits){
		"format":  func(t *traits) { t.Format++ },
		"image":   func(t *traits) { t.Image += "0" },
		"driver":  func(t *traits) { t.Driver = "other" },
		"version": func(t *traits) { t.Version = "10" },
		"cpu":     func(t *traits) { t.CPU = "other" },
		"vcpus":   func(t *traits) { t.Shape.VCPUs++ },
		"memory":  func(t *traits) { t.Shape.MemoryMiB++ },
	} {
		tr := traitsOf(s, tmpl.Image, tmpl.Shape)
		change(&tr)
		if as, taken := keys[tr.key()]; taken {
			t.Errorf("another %s gives the key of %q", what, as)
		}
		keys[tr.key()] = what
	}
	s.version = "10"
	other, err := p.Template(t.Context(), tmpl.Image, tmpl.Shape, nil)
	if err != nil || other.Key == tmpl.Key || s.count("boot") != 1 || other.Version != "10" {
		t.Errorf("with another version: %+v, %v", other, err)
	}
}

func TestDamagedTemplateIsMadeAnew(t *testing.T) {
	write := func(name, content string) func(*testing.T, string) {
		return func(t *testing.T, dir string) {
			path := filepath.Join(dir, name)
			if err := os.Remove(path); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
				t.Fatal(err)
			}
		}
	}
	remove := func(name string) func(*testing.T, string) {
		return func(t *testing.T, dir string) {
			if err := os.Remove(filepath.Join(dir, name)); err != nil {
				t.Fatal(err)
			}
		}
	}
	for what, damage := range map[string]func(*testing.T, string){
		"state changed":      write("state", "device stat3"),
		"state cut":          write("state", "device"),
		"state gone":         remove("state"),
		"manifest gone":      remove(manifestFile),
		"manifest no JSON":   write(manifestFile, "{"),
		"manifest empty":     write(manifestFile, "{}"),
		"memory gone":        remove(ramFile),
		"memory other":       write(ramFile, "x"),
		"directory a file":   func(t *testing.T, dir string) { must(t, os.RemoveAll(dir)); must(t, os.WriteFile(dir, nil, 0o600)) },
		"directory empty":    func(t *testing.T, dir string) { must(t, os.RemoveAll(dir)); must(t, os.Mkdir(dir, 0o700)) },
		"memory written to":  func(t *testing.T, dir string) { poke(t, filepath.Join(dir, ramFile)) },
		"memory writable":    func(t *testing.T, dir string) { must(t, os.Chmod(filepath.Join(dir, ramFile), 0o644)) },
		"memory cut":         func(t *testing.T, dir string) { must(t, os.Truncate(filepath.Join(dir, ramFile), 1<<20)) },
		"foreign manifest":   func(t *testing.T, dir string) { edit(t, dir, `"max"`, `"min"`) },
		"manifest with path": func(t *testing.T, dir string) { edit(t, dir, `"state"`, `"../../node"`) },
	} {
		t.Run(what, func(t *testing.T) {
			s := newStage()
			p, tmpl := made(t, s)
			damage(t, tmpl.Dir)
			for range 2 {
				again, err := p.Template(t.Context(), tmpl.Image, tmpl.Shape, nil)
				if err != nil || again.Key != tmpl.Key {
					t.Fatalf("%+v, %v", again, err)
				}
			}
			if n := s.count("boot"); n != 1 {
				t.Errorf("made anew %d times, want once", n)
			}
			s.empty(t, p)
		})
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// poke changes one byte in place.
func poke(t *testing.T, path string) {
	t.Helper()
	time.Sleep(20 * time.Millisecond) // file times go by the kernel's tick
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	must(t, err)
	_, err = f.WriteAt([]byte{1}, 12345)
	must(t, errors.Join(err, f.Close()))
}

func edit(t *testing.T, dir, old, new string) {
	t.Helper()
	path := filepath.Join(dir, manifestFile)
	b, err := os.ReadFile(path)
	must(t, err)
	changed := strings.ReplaceAll(string(b), old, new)
	if changed == string(b) {
		t.Fatalf("no %s in %s", old, b)
	}
	must(t, os.WriteFile(path, []byte(changed), 0o644))
}

func TestTemplateThatTheDriverRefusesIsMadeAnew(t *testing.T) {
	s := newStage()
	p, tmpl := made(t, s)
	s.fail["restore"] = vmm.ErrTemplate
	if _, err := p.Create(t.Context(), tmpl); !errors.Is(err, vmm.ErrTemplate) {
		t.Fatalf("got %v", err)
	}
	delete(s.fail, "restore")
	for range 2 {
		if _, err := p.Template(t.Context(), tmpl.Image, tmpl.Shape, nil); err != nil {
			t.Fatal(err)
		}
	}
	if n := s.count("boot"); n != 1 {
		t.Errorf("made anew %d times, want once", n)
	}
}

func TestTemplateThatFailsLeavesNothing(t *testing.T) {
	broken := errors.New("broken")
	for _, what := range []string{
		"make jail", "make tap", "launch", "boot", "probe", "warm", "disconnect", "pause", "snapshot",
		"close machine", "close tap", "close jail",
	} {
		t.Run(what, func(t *testing.T) {
			s := newStage()
			dir := dataDir(t)
			p := open(t, s, config(dir))
			s.fail[what] = broken
			if _, err := p.Template(t.Context(), image(t, dir), p.config.Shape(), nil); !errors.Is(err, broken) {
				t.Fatalf("got %v", err)
			}
			s.empty(t, p)
			if left, err := filepath.Glob(filepath.Join(dir, "templates", "*", "*")); err != nil || len(left) != 0 {
				t.Errorf("left: %v, %v", left, err)
			}
			delete(s.fail, what)
			if _, err := p.Template(t.Context(), image(t, dir), p.config.Shape(), nil); err != nil {
				t.Errorf("afterwards: %v", err)
			}
		})
	}
}

func TestTemplateHasATimeLimit(t *testing.T) {
	s := newStage()
	dir := dataDir(t)
	c := config(dir)
	c.TemplateTimeout = 20 * time.Millisecond
	p := open(t, s, c)
	s.hang["probe"] = true
	_, err := p.Template(t.Context(), image(t, dir), p.config.Shape(), nil)
	if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "EPHEMERAL_TEMPLATE_TIMEOUT") {
		t.Fatalf("got %v", err)
	}
	s.empty(t, p)
}

func TestOneOfManyMakesTheTemplate(t *testing.T) {
	s := newStage()
	dir := dataDir(t)
	img := image(t, dir)
	s.before = func(what string) {
		if what == "warm" {
			time.Sleep(200 * time.Millisecond)
		}
	}
	waited := make(chan string, 100)
	var wg sync.WaitGroup
	for range 4 {
		p := open(t, s, config(dir)) // as another process: the lock is of the file, not of the provisioner
		wg.Go(func() {
			if _, err := p.Template(t.Context(), img, p.config.Shape(), func(s string) { waited <- s }); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if n := s.count("boot"); n != 1 {
		t.Errorf("%d booted, want one", n)
	}
	close(waited)
	waits := 0
	for told := range waited {
		if strings.Contains(told, "waiting for another process") {
			waits++
		}
	}
	if waits != 3 {
		t.Errorf("%d were told that they wait, want 3", waits)
	}
}

func TestWaitingForATemplateEndsWithItsContext(t *testing.T) {
	s := newStage()
	dir := dataDir(t)
	img := image(t, dir)
	slow, quick := open(t, s, config(dir)), open(t, s, config(dir))
	s.hang["warm"] = true
	warming := make(chan struct{})
	s.before = func(what string) {
		if what == "warm" {
			close(warming)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		_, err := slow.Template(ctx, img, slow.config.Shape(), nil)
		ended <- err
	}()
	<-warming
	if r, err := quick.Residue(); err != nil || r.Templates != 0 || r.Dirs != 0 {
		t.Errorf("what another builds counts as left: %+v, %v", r, err)
	}
	if r, err := quick.Reconcile(t.Context()); err != nil || r.Templates != 0 || r.Dirs != 0 {
		t.Errorf("what another builds was removed: %+v, %v", r, err)
	}
	short, stop := context.WithTimeout(t.Context(), 30*time.Millisecond)
	defer stop()
	if _, err := quick.Template(short, img, quick.config.Shape(), nil); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v", err)
	}
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	s.empty(t, slow)
}

func TestImageThatMachinesCannotReadIsRefused(t *testing.T) {
	s := newStage()
	dir := dataDir(t)
	p := open(t, s, config(dir))
	img := image(t, dir)
	must(t, os.Chmod(img.RootFS, 0o600))
	_, err := p.Template(t.Context(), img, p.config.Shape(), nil)
	if err == nil || !strings.Contains(err.Error(), "chmod o+r "+img.RootFS) {
		t.Fatalf("got %v", err)
	}
	closed := filepath.Join(dir, "closed")
	must(t, os.Mkdir(closed, 0o700))
	_, err = p.Template(t.Context(), image(t, closed), p.config.Shape(), nil)
	if err == nil || !strings.Contains(err.Error(), "chmod o+x "+closed) {
		t.Fatalf("got %v", err)
	}
}

func TestOldTemplatesGoUnlessTheyAreUsed(t *testing.T) {
	s := newStage()
	dir := dataDir(t)
	img := image(t, dir)
	ram := func(p *Provisioner, version string) string {
		t.Helper()
		s.version = version
		tmpl, err := p.Template(t.Context(), img, p.config.Shape(), nil)
		must(t, err)
		time.Sleep(10 * time.Millisecond) // file times go by the kernel's tick
		return tmpl.RAM
	}
	user, maker := open(t, s, config(dir)), open(t, s, config(dir))
	used := ram(user, "1")
	var made []string
	for _, version := range []string{"2", "3", "4", "5"} {
		maker := open(t, s, config(dir))
		made = append(made, ram(maker, version))
		must(t, maker.Close())
	}
	made = append(made, ram(maker, "6"))
	for path, want := range map[string]bool{used: true, made[0]: false, made[1]: false, made[2]: true, made[3]: true, made[4]: true} {
		if _, err := os.Stat(path); (err == nil) != want {
			t.Errorf("%s is there: %v, want %v", path, err == nil, want)
		}
	}
	must(t, errors.Join(user.Close(), maker.Close()))
	ram(open(t, s, config(dir)), "7")
	if _, err := os.Stat(used); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("one that is used no more stays: %v", err)
	}
	s.empty(t, maker)
}

func TestLookingForUnusedTemplatesDoesNotDisturbThoseWhoUseThem(t *testing.T) {
	s := newStage()
	p, tmpl := made(t, s)
	must(t, p.letGo())
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
				if err := p.prune(); err != nil {
					t.Error(err)
				}
			}
		}
	})
	for range 200 {
		if _, err := open(t, s, p.config).Template(t.Context(), tmpl.Image, tmpl.Shape, nil); err != nil {
			t.Fatal(err)
		}
	}
	close(stop)
	wg.Wait()
	if n := s.count("boot"); n != 0 {
		t.Errorf("made anew %d times", n)
	}
}
