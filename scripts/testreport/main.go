// Command testreport reads the output of "go test -json", shows what failed and what was skipped, and closes with the line
// "N passed, N failed, N skipped". It exits with 1 if anything failed or nothing passed. With -log it also shows, as they come,
// the lines that tests logged.
package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"regexp"
	"strings"
)

func main() {
	log := flag.Bool("log", false, "show the lines that tests log")
	flag.Parse()
	ok, err := report(os.Stdin, os.Stdout, *log)
	if err != nil {
		fmt.Fprintln(os.Stderr, "testreport:", err)
	}
	if err != nil || !ok {
		os.Exit(1)
	}
}

// event is one line of "go test -json": go doc test2json, and "go help buildjson" for those of a build.
type event struct {
	Action     string
	Package    string
	ImportPath string
	Test       string
	Elapsed    float64 // seconds
	Output     string
}

// keepOutput bounds what is kept of one test's output, in bytes.
const keepOutput = 256 << 10

// logged is how a line begins that a test has logged.
var logged = regexp.MustCompile(`^ +\w+_test\.go:\d+: `)

// maxLine bounds a line of input, in bytes. test2json cuts longer lines of output.
const maxLine = 16 << 20

// test is what is known of a test, or of a package as a whole (name "").
type test struct {
	result string // pass, fail, skip; empty while it runs
	parent bool   // has subtests, which are counted in its place
	failed bool   // one of its subtests failed
	ran    bool   // it is a test, and not just the beginning of a name with a slash in it
	output strings.Builder
}

type counts struct{ passed, failed, skipped int }

type reporter struct {
	w        io.Writer
	packages map[string]map[string]*test
	order    map[string][]string // tests of a package as they started
	skipped  []string
	total    counts
	log      bool // lines that tests log are shown
}

// report reads events to their end. It tells whether something passed and nothing failed.
func report(r io.Reader, w io.Writer, log bool) (bool, error) {
	rep := &reporter{w: w, log: log, packages: map[string]map[string]*test{}, order: map[string][]string{}}
	scan := bufio.NewScanner(r)
	scan.Buffer(nil, maxLine)
	for scan.Scan() {
		var e event
		if err := json.Unmarshal(scan.Bytes(), &e); err != nil {
			// The go command itself writes here when it cannot start.
			fmt.Fprintf(w, "%s\n", scan.Bytes())
			continue
		}
		rep.take(e)
	}
	if err := scan.Err(); err != nil {
		return false, fmt.Errorf("read test events: %w", err)
	}
	for name := range rep.packages {
		fmt.Fprintf(w, "FAIL  %s  did not end\n", name)
		rep.total.failed++
	}
	for _, line := range rep.skipped {
		fmt.Fprintln(w, line)
	}
	fmt.Fprintf(w, "%d passed, %d failed, %d skipped\n", rep.total.passed, rep.total.failed, rep.total.skipped)
	if rep.total.passed == 0 {
		return false, errors.New("no test has passed")
	}
	return rep.total.failed == 0, nil
}

// take notes one event.
func (r *reporter) take(e event) {
	if e.Action == "build-output" {
		fmt.Fprint(r.w, e.Output)
		return
	}
	if e.Package == "" {
		return
	}
	t := r.test(e.Package, e.Test)
	t.ran = t.ran || e.Test != ""
	switch e.Action {
	case "output":
		if r.log && logged.MatchString(e.Output) {
			fmt.Fprint(r.w, "      ", strings.TrimLeft(e.Output, " "))
		}
		if t.output.Len() < keepOutput {
			t.output.WriteString(e.Output)
		}
	case "pass", "fail", "skip":
		t.result = e.Action
		if e.Test == "" {
			r.finish(e.Package, e.Elapsed)
		} else if t.result == "pass" {
			t.output.Reset()
		}
	}
}

// test finds or adds a test; its parents are marked as such.
func (r *reporter) test(pkg, name string) *test {
	tests := r.packages[pkg]
	if tests == nil {
		tests = map[string]*test{}
		r.packages[pkg] = tests
	}
	if t := tests[name]; t != nil {
		return t
	}
	t := &test{}
	tests[name] = t
	r.order[pkg] = append(r.order[pkg], name)
	if i := strings.LastIndexByte(name, '/'); i > 0 {
		r.test(pkg, name[:i]).parent = true
	}
	return t
}

// finish counts the tests of a package that has ended, and shows it.
func (r *reporter) finish(pkg string, seconds float64) {
	tests, names := r.packages[pkg], r.order[pkg]
	whole := tests[""]
	var c counts
	// Subtests come after their parents: from the end, a parent knows of its subtests.
	for i := len(names) - 1; i >= 0; i-- {
		if names[i] != "" {
			r.count(&c, pkg, names[i])
		}
	}
	if whole.result == "fail" && c.failed == 0 {
		// It did not build, or died outside of any test.
		c.failed++
		r.show(pkg, "")
	}
	word := map[string]string{"pass": "ok", "fail": "FAIL", "skip": "none"}[whole.result]
	fmt.Fprintf(r.w, "%-4s  %s  %.1fs  %d passed, %d failed, %d skipped\n", word, pkg, seconds, c.passed, c.failed, c.skipped)
	r.total.passed += c.passed
	r.total.failed += c.failed
	r.total.skipped += c.skipped
	delete(r.packages, pkg)
	delete(r.order, pkg)
}

// count counts one test. A parent counts only when it failed although all its subtests did well.
func (r *reporter) count(c *counts, pkg, name string) {
	tests := r.packages[pkg]
	t := tests[name]
	if !t.ran {
		if t.failed {
			markParent(tests, name)
		}
		return
	}
	if t.result == "" {
		t.result = "fail" // the package ended first
	}
	if t.parent && (t.result != "fail" || t.failed) {
		if t.result == "fail" {
			r.show(pkg, name)
			markParent(tests, name)
		}
		return
	}
	switch t.result {
	case "pass":
		c.passed++
	case "skip":
		c.skipped++
		r.skipped = append(r.skipped, fmt.Sprintf("skip  %s %s: %s", pkg, name, reason(t.output.String())))
	case "fail":
		c.failed++
		markParent(tests, name)
		r.show(pkg, name)
	}
}

func markParent(tests map[string]*test, name string) {
	if i := strings.LastIndexByte(name, '/'); i > 0 {
		tests[name[:i]].failed = true
	}
}

// show writes the output of a test that failed.
func (r *reporter) show(pkg, name string) {
	fmt.Fprintf(r.w, "FAIL  %s %s\n", pkg, name)
	for line := range strings.Lines(r.packages[pkg][name].output.String()) {
		fmt.Fprintf(r.w, "      %s\n", strings.TrimRight(line, "\n"))
	}
}

// reason is the line in which a test says why it is skipped: "    file_test.go:12: reason".
func reason(output string) string {
	for line := range strings.Lines(output) {
		_, why, found := strings.Cut(strings.TrimSpace(line), ".go:")
		if _, why, ok := strings.Cut(why, ": "); found && ok {
			return why
		}
	}
	return "no reason given"
}
