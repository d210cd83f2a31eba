package kvmbox

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ephemeral-run/ephemeral/images"
	"github.com/ephemeral-run/ephemeral/vmm"
	"github.com/ephemeral-run/ephemeral/vmm/qemu"
	"github.com/ephemeral-run/ephemeral/vmm/vmmtest"
)

// insideVariable is set in the place: the test's program then is what runs there.
const insideVariable = "EPHEMERAL_TEST_INSIDE"

// limit is for everything a test does in a box, on a busy host and with the box's image still to be built.
const limit = 15 * time.Minute

// checkout is the directory of the repository.
func checkout(t testing.TB) string {
	t.Helper()
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	return root
}

// boxes is where boxes are kept: shared by all tests, so that their image is built once.
func boxes(t testing.TB) string {
	t.Helper()
	return filepath.Join(checkout(t), "build", "kvmbox")
}

// image is the one that the environment names, or that `make image` builds.
func image(t testing.TB) images.Image {
	t.Helper()
	dir := os.Getenv("EPHEMERAL_TEST_IMAGE")
	if dir == "" {
		dir = filepath.Join(checkout(t), "build", "images", "base")
	}
	img, err := images.Open(dir)
	if err != nil {
		t.Fatalf("%v: run make image", err)
	}
	return img
}

// imageDir is the image's directory itself, to be carried.
func imageDir(t testing.TB) string {
	t.Helper()
	dir, err := filepath.EvalSymlinks(filepath.Dir(image(t).Kernel))
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// open gives a place that ends with the test.
func open(t *testing.T, carry map[string]string) Place {
	t.Helper()
	return openAny(t, carry, false)
}

// openAny is open, and takes a box in any case if told.
func openAny(t *testing.T, carry map[string]string, boxed bool) Place {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	place, err := Open(ctx, Options{
		Dir: boxes(t), Root: checkout(t), Carry: carry, Box: boxed, Progress: func(line string) { t.Log(line) },
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := place.Close(); err != nil {
			t.Error(err)
		}
		if left, _ := filepath.Glob(filepath.Join(boxes(t), runPrefix+"*")); len(left) > 0 && place.Boxed() {
			t.Errorf("left behind: %q", left)
		}
	})
	return place
}

// TestMachineOnKVM boots a machine with KVM, makes a template of it, restores a clone and runs commands in it. All of that
// happens in the place, where this very test runs again. Before, the place itself is tried.
func TestMachineOnKVM(t *testing.T) {
	if os.Getenv(insideVariable) != "" {
		machineOnKVM(t)
		return
	}
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	dir := t.TempDir()
	program := filepath.Join(dir, "inside.test")
	if err := BuildTest(ctx, checkout(t), "./test/kvmbox", program); err != nil {
		t.Fatal(err)
	}
	note := filepath.Join(dir, "note")
	if err := os.WriteFile(note, []byte("carried\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	place := open(t, map[string]string{
		"inside.test": program, "some/note": note, "image": imageDir(t),
	})
	t.Run("Place", func(t *testing.T) { checkPlace(t, place) })

	var out bytes.Buffer
	code, err := place.Run(ctx, Command{
		Args:   []string{place.Path("inside.test"), "-test.v", "-test.run", "^TestMachineOnKVM$", "-test.timeout", limit.String()},
		Env:    []string{insideVariable + "=" + strconv.FormatBool(place.Boxed()), "EPHEMERAL_TEST_IMAGE=" + place.Path("image")},
		Dir:    "/tmp",
		Stdout: io.MultiWriter(&out, t.Output()), Stderr: t.Output(),
	})
	if err != nil || code != 0 {
		t.Fatalf("code %d, %v", code, err)
	}
	if !strings.Contains(out.String(), "--- PASS: TestMachineOnKVM") {
		t.Error("the test has not run in the place")
	}
	if b, ok := place.(*box); ok {
		t.Run("Hung", func(t *testing.T) { checkHung(t, b) })
	}
}

// checkHung stops the box under a command. The box is of no more use.
func checkHung(t *testing.T, b *box) {
	b.hangLimit = time.Second
	stats, err := b.machine.Stats()
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Kill(stats.Pid, unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if _, err := b.Run(ctx, Command{Args: []string{"sleep", "1000"}}); !errors.Is(err, ErrHung) {
		t.Errorf("the box stopped: %v", err)
	}
}

// machineOnKVM is the part that runs in the place.
func machineOnKVM(t *testing.T) {
	if ok, reason := vmm.KVMUsable(); !ok {
		t.Fatal(reason)
	}
	path := os.Getenv("EPHEMERAL_QEMU")
	if path == "" {
		path = "qemu-system-x86_64"
	}
	driver, err := qemu.New(qemu.Config{Path: path, Accel: "kvm", TBSize: 64, VMGenID: true})
	if err != nil {
		t.Fatal(err)
	}
	if driver.Isolation() != vmm.KVM {
		t.Fatalf("isolation %s", driver.Isolation())
	}
	h := vmmtest.Harness{Driver: driver, Image: image(t), Shape: vmm.Shape{VCPUs: 1, MemoryMiB: 384}}
	if os.Getenv(insideVariable) == "true" {
		h.Slow = slowInBox
	}
	began := time.Now()
	template := h.MakeTemplate(t, t.TempDir())
	t.Logf("boot and template: %v", time.Since(began).Round(time.Millisecond))
	for range 3 {
		times, err := h.TimeClone(t.Context(), t, template)
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("restore to first answer: %v, to the end of the first command: %v", times.Ready.Round(time.Millisecond), times.Exec.Round(time.Millisecond))
	}
	if err := driver.Close(); err != nil {
		t.Error(err)
	}
}

// checkPlace checks what every place promises.
func checkPlace(t *testing.T, place Place) {
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	sh := func(script string) (string, string, int) {
		t.Helper()
		var stdout, stderr bytes.Buffer
		code, err := place.Run(ctx, Command{Args: []string{"sh", "-c", script}, Env: []string{"GREETING=hello"}, Stdout: &stdout, Stderr: &stderr})
		if err != nil {
			t.Fatalf("%s: %v", script, err)
		}
		return stdout.String(), stderr.String(), code
	}
	if out, said, code := sh(`echo $GREETING; echo oops >&2; exit 7`); out != "hello\n" || said != "oops\n" || code != 7 {
		t.Errorf("stdout %q, stderr %q, code %d", out, said, code)
	}
	if _, _, code := sh(`kill -KILL $$`); code != 137 {
		t.Errorf("killed by a signal: code %d", code)
	}
	if out, _, _ := sh(`id -u; test -c /dev/kvm && echo kvm`); out != "0\nkvm\n" {
		t.Errorf("user and device: %q", out)
	}
	if place.Boxed() {
		if out, _, code := sh(`nproc; echo changed >` + place.Path("some/note")); out != "1\n" || code != 0 {
			t.Errorf("processors %q, code %d", out, code)
		}
		if b, err := place.ReadFile(ctx, place.Path("some/note"), 100); err != nil || string(b) != "changed\n" {
			t.Errorf("written in the box: %q, %v", b, err)
		}
		checkWoken(t, sh)
	}
	checkFiles(t, place)
	checkCancel(t, place)
}

// checkWoken counts the interrupts that a box with nothing to do gets by its line: without them a lost one of the timer
// would stop it for good.
func checkWoken(t *testing.T, sh func(string) (string, string, int)) {
	t.Helper()
	const seconds, least = 6, 3
	out, said, code := sh(`
device=$(cd /sys/bus/virtio/drivers/virtio_console && echo virtio*)
count() { awk -v d="$device-" 'index($0, d) { n += $2 } END { print n + 0 }' /proc/interrupts; }
before=$(count); sleep ` + strconv.Itoa(seconds) + `; echo $(($(count) - before))`)
	if n, err := strconv.Atoi(strings.TrimSpace(out)); err != nil || code != 0 || n < least {
		t.Errorf("%d s in a box with nothing to do: %q interrupts by its line, want %d and more: code %d, %s", seconds, out, least, code, said)
	}
}

func checkFiles(t *testing.T, place Place) {
	t.Helper()
	if _, err := place.ReadFile(t.Context(), place.Path("image")+"/manifest.json", 100); err == nil || !strings.Contains(err.Error(), "longer than 100") {
		t.Errorf("too long a file: %v", err)
	}
	if b, err := place.ReadFile(t.Context(), place.Path("image")+"/manifest.json", 1<<20); err != nil || !bytes.HasPrefix(b, []byte("{")) {
		t.Errorf("manifest: %.20q, %v", b, err)
	}
	if _, err := place.ReadFile(t.Context(), "/missing", 100); err == nil {
		t.Error("a missing file is read")
	}
}

// checkCancel ends a command that has a child, by the end of its context.
func checkCancel(t *testing.T, place Place) {
	t.Helper()
	ctx, cancel := context.WithCancelCause(t.Context())
	defer cancel(nil)
	reason := errors.New("enough")
	r, w := io.Pipe()
	go func() {
		_, _ = bufio.NewReader(r).ReadString('\n')
		cancel(reason)
		_, _ = io.Copy(io.Discard, r)
	}()
	const mark = "86399.25"
	_, err := place.Run(ctx, Command{Args: []string{"sh", "-c", "sleep " + mark + " & echo begun; wait"}, Stdout: w})
	_ = w.Close()
	if !errors.Is(err, reason) {
		t.Errorf("cancelled: %v", err)
	}
	deadline := time.Now().Add(30 * time.Second)
	for {
		code, err := place.Run(t.Context(), Command{Args: []string{"sh", "-c", "! grep -lqs '^sleep." + mark + "' /proc/[0-9]*/cmdline"}})
		if err == nil && code == 0 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("the child of a cancelled command is alive: code %d, %v", code, err)
		}
		time.Sleep(100 * time.Millisecond)
	}
}

// TestHost runs the same checks on this host, which need nothing but a device by that name.
func TestHost(t *testing.T) {
	note := filepath.Join(t.TempDir(), "note")
	if err := os.WriteFile(note, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	place := &host{carry: map[string]string{"some/note": note, "image": imageDir(t)}}
	checkFiles(t, place)
	checkCancel(t, place)
	code, err := place.Run(t.Context(), Command{Args: []string{"sh", "-c", "exit 3"}, Dir: filepath.Dir(note)})
	if err != nil || code != 3 {
		t.Errorf("code %d, %v", code, err)
	}
	if code, err := place.Run(t.Context(), Command{Args: []string{"sh", "-c", "kill -TERM $$"}}); err != nil || code != 143 {
		t.Errorf("killed by a signal: code %d, %v", code, err)
	}
	if _, err := place.Run(t.Context(), Command{Args: []string{"/missing"}}); err == nil {
		t.Error("a missing program runs")
	}
}

// TestInterrupted ends the program while its box boots, in a way that it sees and in one that it does not.
func TestInterrupted(t *testing.T) {
	dir := boxes(t)
	program := filepath.Join(t.TempDir(), "kvmbox")
	if err := Build(t.Context(), checkout(t), "./test/kvmbox/cmd", program); err != nil {
		t.Fatal(err)
	}
	for _, signal := range []unix.Signal{unix.SIGINT, unix.SIGKILL} {
		t.Run(unix.SignalName(signal), func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), limit)
			defer cancel()
			cmd := exec.CommandContext(ctx, program, "run", "--box", "--dir", dir, "--limit", limit.String(), "--", "sleep", "1000")
			cmd.Dir = checkout(t)
			said, err := cmd.StderrPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			lines := bufio.NewScanner(said)
			for lines.Scan() && !strings.Contains(lines.Text(), "booting a box") {
				t.Log(lines.Text())
			}
			hypervisor := child(t, ctx, cmd.Process.Pid)
			if err := cmd.Process.Signal(signal); err != nil {
				t.Fatal(err)
			}
			_, _ = io.Copy(t.Output(), said)
			if err := cmd.Wait(); err == nil {
				t.Error("it ended well")
			}
			gone(t, hypervisor)
			if signal == unix.SIGKILL { // the next box removes what is left
				unlock, err := lock(ctx, Options{Dir: dir, Progress: func(string) {}})
				if err != nil {
					t.Fatal(err)
				}
				defer func() { _ = unlock() }()
			}
			if left, _ := filepath.Glob(filepath.Join(dir, runPrefix+"*")); len(left) > 0 {
				t.Errorf("left behind: %q", left)
			}
		})
	}
}

// child waits for a child of the process that is a hypervisor with a box's directory, and returns its number.
func child(t *testing.T, ctx context.Context, parent int) int {
	t.Helper()
	for ctx.Err() == nil {
		entries, _ := filepath.Glob("/proc/[0-9]*/status")
		for _, entry := range entries {
			status, _ := os.ReadFile(entry)
			line, _ := os.ReadFile(filepath.Join(filepath.Dir(entry), "cmdline"))
			if bytes.Contains(status, []byte("\nPPid:\t"+strconv.Itoa(parent)+"\n")) && bytes.Contains(line, []byte("ephemeral-")) {
				pid, err := strconv.Atoi(filepath.Base(filepath.Dir(entry)))
				if err != nil {
					t.Fatal(err)
				}
				return pid
			}
		}
		time.Sleep(20 * time.Millisecond)
	}
	t.Fatal("the hypervisor has not started")
	return 0
}

func gone(t *testing.T, pid int) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		if err := unix.Kill(pid, 0); errors.Is(err, unix.ESRCH) {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("process %d is left", pid)
		}
	}
}

func TestCarry(t *testing.T) {
	from, to := t.TempDir(), filepath.Join(t.TempDir(), "tree")
	for name, content := range map[string]string{"a": "1", "sub/b": "22"} {
		path := filepath.Join(from, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(content), 0o640)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("sub/b", filepath.Join(from, "link")); err != nil {
		t.Fatal(err)
	}
	if err := place(from, to); err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(filepath.Join(to, "link")); err != nil || string(b) != "22" {
		t.Errorf("through the link: %q, %v", b, err)
	}
	if link, err := os.Readlink(filepath.Join(to, "link")); err != nil || link != "sub/b" {
		t.Errorf("the link: %q, %v", link, err)
	}
	if err := unix.Mkfifo(filepath.Join(from, "pipe"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := place(from, filepath.Join(t.TempDir(), "other")); err == nil {
		t.Error("a pipe is carried")
	}
	for name, path := range map[string]string{"../up": "/etc/hosts", "/abs": "/etc/hosts", "name": "relative"} {
		if _, err := Open(t.Context(), Options{Dir: t.TempDir(), Carry: map[string]string{name: path}}); err == nil {
			t.Errorf("carries %s as %s", path, name)
		}
	}
}
