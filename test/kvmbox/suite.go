package kvmbox

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Suite is what `make test-kvm` runs: the conformance suite on every driver, and one whole run of the product.
type Suite struct {
	Root     string // the checkout, with build/ephemeral and build/guestagent built
	Dir      string // of what boxes are made from
	ImageDir string // directory of images, which has "base"
	// CloudHypervisor is its program; empty: what EPHEMERAL_TEST_CLOUD_HYPERVISOR names, or what is on the PATH.
	CloudHypervisor string
	Box             bool // take a box even where this host's KVM serves
	// Limit is the time for each driver's tests, and for the run.
	Limit time.Duration
	// Rounds is how often Cloud Hypervisor's conformance suite runs, its other tests once; 0: once.
	Rounds int
	// Drivers to test, the run counted as one named "run"; empty: all.
	Only []string
	Out  io.Writer
	// Progress is called with a line for each step.
	Progress func(message string)
}

// Record is the outcome of a suite.
type Record struct {
	Place   string           `json:"place"`
	Drivers map[string]Count `json:"drivers"`
	// Run is the finished run, as the API shows it; null when it was left out or did not finish.
	Run json.RawMessage `json:"run"`
	// RunError says why there is no run, or what is wrong with it.
	RunError string `json:"run_error,omitempty"`
	// BoxHangs is how often a box stopped, and what ran in it was begun anew in another.
	BoxHangs int `json:"box_hangs"`
}

// Passed tells whether nothing failed. What was left out, having no program to test, is no failure.
func (r *Record) Passed() bool {
	for _, c := range r.Drivers {
		if c.Failed > 0 {
			return false
		}
	}
	return r.RunError == ""
}

// Summarise writes the counts, and plainly what was left out and why.
func (r *Record) Summarise(w io.Writer) {
	for _, d := range drivers {
		c, ok := r.Drivers[d.name]
		if !ok {
			c = Count{Reasons: []string{"not reached"}}
		}
		fmt.Fprintf(w, "%s: %d passed, %d failed, %d left out, in %d rounds\n", d.name, c.Passed, c.Failed, c.LeftOut, c.Rounds)
		for _, reason := range c.Reasons {
			fmt.Fprintf(w, "  %s\n", reason)
		}
	}
	if r.BoxHangs > 0 {
		fmt.Fprintf(w, "%d boxes stopped, and what ran in them was begun anew\n", r.BoxHangs)
	}
	var run struct{ State, Isolation string }
	switch err := json.Unmarshal(r.Run, &run); {
	case r.RunError != "":
		fmt.Fprintf(w, "recorded run: failed: %s\n", r.RunError)
	case err != nil || run.State == "":
		fmt.Fprintln(w, "recorded run: left out")
	default:
		fmt.Fprintf(w, "recorded run: %s, isolation %s\n", run.State, run.Isolation)
	}
}

// slowInBox multiplies the time limits of tests in a box.
const slowInBox = 20

// driver is one whose tests run.
type driver struct {
	name  string
	pkg   string // of the tests
	run   string // regular expression of the tests to run
	again string // of those to repeat
}

var drivers = []driver{
	{"cloud-hypervisor", "vmm/cloudhypervisor", "^TestReal", "^TestRealConformance$"},
	{"qemu", "vmm/qemu", "^TestConformance$", ""},
}

// Names below a place's directory.
const (
	checkoutName = "checkout"
	programName  = "bin/cloud-hypervisor"
	imageName    = checkoutName + "/build/images/base"
)

// Run runs the suite, each part in a place of its own. An error says that it did not come to its end; the record then has
// what is known.
func (s *Suite) Run(ctx context.Context) (*Record, error) {
	r := &Record{Drivers: map[string]Count{}, Run: json.RawMessage("null")}
	missing := s.findCloudHypervisor()
	var err error
	if s.ImageDir, err = filepath.Abs(s.ImageDir); err != nil {
		return r, err
	}
	carry, err := s.carry(ctx)
	if err != nil {
		return r, err
	}
	if s.wanted("run") { // first, since it tells most and takes least
		s.recordRun(ctx, carry, r)
	} else {
		s.Progress("the recorded run is left out: not asked for")
	}
	for _, d := range drivers {
		count := Count{Reasons: []string{}}
		switch {
		case !s.wanted(d.name):
			count.leaveOut("not asked for")
		case d.name == "cloud-hypervisor" && missing != "":
			count.leaveOut(missing)
		default:
			err = s.inPlace(ctx, carry, r, func(place Place) error {
				s.Progress("testing " + d.name + " in " + place.Describe())
				count, err = s.testDriver(ctx, place, d)
				return err
			})
			if err != nil {
				count.fail(err.Error())
			}
		}
		r.Drivers[d.name] = count
		if ctx.Err() != nil {
			return r, context.Cause(ctx)
		}
	}
	return r, context.Cause(ctx)
}

// recordRun makes the recorded run and notes its outcome.
func (s *Suite) recordRun(ctx context.Context, carry map[string]string, r *Record) {
	err := s.inPlace(ctx, carry, r, func(place Place) error {
		s.Progress("the recorded run, in " + place.Describe())
		record, err := s.recordedRun(ctx, place)
		if record != nil {
			r.Run = record
		}
		return err
	})
	if err != nil {
		r.RunError = err.Error()
	}
}

// maxHangs is how many boxes may stop before a part is given up.
const maxHangs = 2

// inPlace opens a place, which nothing that ran before can have spoiled, for f. Should it be a box that stops, f is called
// anew with another.
func (s *Suite) inPlace(ctx context.Context, carry map[string]string, r *Record, f func(Place) error) error {
	for hangs := 0; ; hangs++ {
		place, err := Open(ctx, Options{Dir: s.Dir, Root: s.Root, Carry: carry, Box: s.Box, Progress: s.Progress})
		if err != nil {
			return err
		}
		r.Place = place.Describe()
		err = errors.Join(f(place), place.Close())
		if !errors.Is(err, ErrHung) || hangs == maxHangs {
			return err
		}
		r.BoxHangs++
		s.Progress(err.Error())
		s.Progress("begin anew in another box")
	}
}

// findCloudHypervisor says why there is none.
func (s *Suite) findCloudHypervisor() (missing string) {
	if s.CloudHypervisor == "" {
		s.CloudHypervisor = os.Getenv("EPHEMERAL_TEST_CLOUD_HYPERVISOR")
	}
	if s.CloudHypervisor == "" {
		s.CloudHypervisor, _ = exec.LookPath("cloud-hypervisor")
	}
	if s.CloudHypervisor == "" {
		return "no program: EPHEMERAL_TEST_CLOUD_HYPERVISOR names none and cloud-hypervisor is not on the PATH"
	}
	path, err := filepath.EvalSymlinks(s.CloudHypervisor)
	if err == nil {
		path, err = filepath.Abs(path)
	}
	if err != nil {
		s.CloudHypervisor = ""
		return fmt.Sprintf("no program: %v", err)
	}
	s.CloudHypervisor = path
	return ""
}

func (s *Suite) wanted(name string) bool {
	return len(s.Only) == 0 || slices.Contains(s.Only, name)
}

// carry builds the tests and says what they and the run need.
func (s *Suite) carry(ctx context.Context) (map[string]string, error) {
	link := filepath.Join(s.ImageDir, "base")
	image, err := filepath.EvalSymlinks(link)
	if err != nil {
		return nil, fmt.Errorf("no image: run make image: %w", err)
	}
	carry := map[string]string{
		imageName: link,
		filepath.Join(filepath.Dir(imageName), filepath.Base(image)): image,
		"bin/go": filepath.Join(s.Root, "test/kvmbox/bin/go"),
	}
	for _, name := range []string{"scripts", "docs/examples", "build/ephemeral", "build/guestagent"} {
		carry[checkoutName+"/"+name] = filepath.Join(s.Root, name)
	}
	if s.CloudHypervisor != "" {
		carry[programName] = s.CloudHypervisor
	}
	for _, d := range drivers {
		if !s.wanted(d.name) {
			continue
		}
		path := filepath.Join(s.Dir, d.name+".test")
		s.Progress("building the tests of " + d.pkg)
		if err := os.MkdirAll(s.Dir, 0o755); err != nil {
			return nil, err
		}
		if err := BuildTest(ctx, s.Root, "./"+d.pkg, path); err != nil {
			return nil, err
		}
		carry["tests/"+d.name] = path
	}
	return carry, nil
}

// environment of tests and run in the place.
func (s *Suite) environment(place Place) []string {
	image, program, path := place.Path(imageName), place.Path(programName), place.Path("bin")+":"+boxPath
	env := []string{"EPHEMERAL_TEST_SLOW=" + strconv.Itoa(slowInBox)}
	if !place.Boxed() {
		image, program, path, env = filepath.Join(s.ImageDir, "base"), s.CloudHypervisor, os.Getenv("PATH"), nil
	}
	env = append(env, "EPHEMERAL_TEST_IMAGE="+image, "PATH="+path)
	if s.CloudHypervisor != "" {
		env = append(env, "EPHEMERAL_TEST_CLOUD_HYPERVISOR="+program, "EPHEMERAL_CLOUD_HYPERVISOR="+program)
	}
	return env
}

// boxPath is where a box has its programs.
const boxPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// testDriver runs the tests of one driver, some of them several times, as long as they pass.
func (s *Suite) testDriver(ctx context.Context, place Place, d driver) (Count, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, s.Limit+time.Minute, fmt.Errorf("the tests of %s did not end within %v", d.name, s.Limit))
	defer cancel()
	count, err := s.testRound(ctx, place, d, d.run)
	for round := 2; round <= s.Rounds && d.again != "" && err == nil && count.Failed == 0; round++ {
		s.Progress(fmt.Sprintf("round %d of %d", round, s.Rounds))
		var more Count
		more, err = s.testRound(ctx, place, d, d.again)
		count.merge(more)
	}
	return count, err
}

// testRound runs the tests whose names match the regular expression.
func (s *Suite) testRound(ctx context.Context, place Place, d driver, run string) (Count, error) {
	dir := "/tmp"
	if !place.Boxed() {
		dir = filepath.Join(s.Root, d.pkg)
	}
	count, code, err := s.count(ctx, place, Command{
		Args: []string{place.Path("tests/" + d.name), "-test.v=test2json", "-test.run", run, "-test.timeout", s.Limit.String()},
		Env:  append(s.environment(place), "EPHEMERAL_QEMU_ACCEL=kvm"),
		Dir:  dir,
	})
	count.Rounds = 1
	switch {
	case err != nil:
	case code != 0 && count.Failed == 0:
		count.fail(fmt.Sprintf("the tests' program ended with code %d", code))
	case count.Passed == 0 && count.Failed == 0:
		count.fail("nothing has run")
	}
	return count, err
}

// count runs a program of tests and counts them, and returns its exit code.
func (s *Suite) count(ctx context.Context, place Place, c Command) (Count, int, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	convert := exec.CommandContext(ctx, "go", "tool", "test2json", "-t")
	convert.Dir = s.Root
	raw, err := convert.StdinPipe()
	if err != nil {
		return Count{}, 0, err
	}
	events, err := convert.StdoutPipe()
	if err != nil {
		return Count{}, 0, err
	}
	if err := convert.Start(); err != nil {
		return Count{}, 0, fmt.Errorf("start test2json: %w", err)
	}
	type ended struct {
		code int
		err  error
	}
	done := make(chan ended, 1)
	go func() {
		c.Stdout, c.Stderr = raw, raw
		code, err := place.Run(ctx, c)
		done <- ended{code, errors.Join(err, raw.Close())}
	}()
	count, err := tally(events, s.Out)
	if err != nil {
		cancel()
	}
	end := <-done
	return count, end.code, errors.Join(end.err, err, convert.Wait())
}

// recordLimit is the most bytes of a finished run.
const recordLimit = 1 << 20

// recordedRun does what `make demo` does, with its checks, and then looks at the record.
func (s *Suite) recordedRun(ctx context.Context, place Place) (json.RawMessage, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, s.Limit, fmt.Errorf("the run did not end within %v", s.Limit))
	defer cancel()
	root := place.Path(checkoutName)
	if !place.Boxed() {
		root = s.Root
	}
	env := append(s.environment(place), "EPHEMERAL_BUILT=yes", "EPHEMERAL_QEMU_ACCEL=kvm")
	if s.CloudHypervisor != "" {
		env = append(env, "EPHEMERAL_HYPERVISOR=cloud-hypervisor")
	}
	if !place.Boxed() {
		env = append(env, "EPHEMERAL_IMAGE_DIR="+s.ImageDir)
	}
	code, err := place.Run(ctx, Command{Args: []string{"bash", "scripts/demo"}, Env: env, Dir: root, Stdout: s.Out, Stderr: s.Out})
	if err != nil {
		return nil, err
	}
	if code != 0 {
		return nil, fmt.Errorf("scripts/demo ended with code %d", code)
	}
	record, err := place.ReadFile(ctx, filepath.Join(root, "build/demo.json"), recordLimit)
	if err != nil {
		return nil, fmt.Errorf("read the finished run: %w", err)
	}
	return record, checkRun(record)
}

// checkRun says what is wrong with a finished run.
func checkRun(record []byte) error {
	var r struct {
		State     string
		Isolation string
		Money     struct {
			Reserved int64 `json:"reserved_micros"`
			Charged  int64 `json:"charged_micros"`
			Released int64 `json:"released_micros"`
		}
		Result struct{ Output string }
	}
	if err := json.Unmarshal(record, &r); err != nil {
		return fmt.Errorf("the finished run: %w", err)
	}
	var errs []error
	if r.State != "succeeded" {
		errs = append(errs, fmt.Errorf("the run %s", r.State))
	}
	if r.Isolation != "kvm" {
		errs = append(errs, fmt.Errorf("the run's isolation is %q, not kvm", r.Isolation))
	}
	if m := r.Money; m.Charged <= 0 || m.Charged+m.Released != m.Reserved {
		errs = append(errs, fmt.Errorf("the run's money does not add up: %+v", m))
	}
	for _, want := range []string{"2 3 5 7 11 13 17 19 23 29 31 37 41 43 47", "whoami: worker", "curl: (6) Could not resolve host: example.com", "/tmp/proof.txt"} {
		if !strings.Contains(r.Result.Output, want) {
			errs = append(errs, fmt.Errorf("the run's answer lacks %q", want))
		}
	}
	return errors.Join(errs...)
}
