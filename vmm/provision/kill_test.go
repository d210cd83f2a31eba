package provision_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/ephemeral-run/ephemeral/vmm/provision"
)

// hold is the life of the process that nodeKilled kills.
func hold(dir string) (err error) {
	p, tmpl, _, end, err := openReal(context.Background(), dir, func(s string) { fmt.Fprintln(os.Stderr, s) })
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, end()) }()
	for i := range 3 {
		m, err := p.Create(context.Background(), tmpl)
		if err != nil {
			return err
		}
		if i == 0 { // one works, the others rest
			if err := m.Wake(context.Background()); err != nil {
				return err
			}
		}
	}
	if _, err := os.MkdirTemp(filepath.Join(dir, "templates"), ".build-x-*"); err != nil {
		return err
	}
	fmt.Println("holding")
	time.Sleep(time.Hour) // to be killed
	return nil
}

// nodeKilled kills a process that holds machines and looks whether the next one removes everything.
func nodeKilled(t *testing.T, dir string) {
	for range 2 {
		holder := exec.Command(os.Args[0])
		holder.Env = append(os.Environ(), holdVariable+"="+dir)
		holder.Stderr = os.Stderr
		out, err := holder.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := holder.Start(); err != nil {
			t.Fatal(err)
		}
		watchdog := time.AfterFunc(2*time.Minute, func() { _ = holder.Process.Kill() })
		line, err := bufio.NewReader(out).ReadString('\n')
		watchdog.Stop()
		if err != nil || line != "holding\n" {
			_ = holder.Process.Kill()
			t.Fatalf("the holder says %q, %v, %v", line, err, holder.Wait())
		}
		alive, err := provision.Survey(realConfig(dir))
		if err != nil || alive.Processes < 3 || alive.Taps != 3 || alive.Cgroups != 3 || alive.Namespaces != 1 || alive.Dirs != 0 {
			t.Errorf("while it holds: %+v, %v", alive, err)
		}
		if err := holder.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		_ = holder.Wait() // killed, as it says

		driver, err := realDriver()
		if err != nil {
			t.Fatal(err)
		}
		p, err := provision.New(t.Context(), realConfig(dir), driver, realAgent())
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		removed, err := p.Reconcile(ctx)
		t.Logf("removed %+v", removed)
		if err != nil || removed.Cgroups != 3 || removed.Dirs != 3 || removed.Namespaces != 1 || removed.Templates != 1 {
			t.Errorf("removed %+v, %v", removed, err)
		}
		if again, err := p.Reconcile(ctx); err != nil || again.Total() != 0 {
			t.Errorf("the second time %+v, %v", again, err)
		}
		if left, err := p.Residue(); err != nil || left.Total() != 0 {
			t.Errorf("left %+v, %v", left, err)
		}
		if err := errors.Join(p.Close(), driver.Close()); err != nil {
			t.Error(err)
		}
		nothingLeft(t, dir)
	}
}
