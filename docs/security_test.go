// Package docs holds what keeps the documentation true.
package docs

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

var named = regexp.MustCompile("`([a-z0-9/]+)\\.(Test[A-Za-z0-9_]+)`")

// TestEveryWallHasItsTest: each row of the table of walls names tests, and each test that the page names is there.
func TestEveryWallHasItsTest(t *testing.T) {
	page, err := os.ReadFile("security.md")
	if err != nil {
		t.Fatal(err)
	}
	_, walls, ok := strings.Cut(string(page), "## The walls")
	if !ok {
		t.Fatal("the page has no table of walls")
	}
	rows := 0
	for line := range strings.Lines(walls) {
		if strings.HasPrefix(line, "## ") {
			break
		}
		if !strings.HasPrefix(line, "| ") || strings.HasPrefix(line, "| wall ") {
			continue
		}
		rows++
		if !named.MatchString(line) && !strings.Contains(line, "the processor") {
			t.Errorf("no test is named: %s", line)
		}
	}
	if rows < 10 {
		t.Errorf("%d walls", rows)
	}
	sources := map[string]string{}
	for _, m := range named.FindAllStringSubmatch(string(page), -1) {
		dir, test := m[1], m[2]
		if sources[dir] == "" {
			sources[dir] = testsIn(t, dir)
		}
		if !strings.Contains(sources[dir], "\nfunc "+test+"(t *testing.T) {") {
			t.Errorf("%s has no %s", dir, test)
		}
	}
}

// testsIn is the text of a package's tests.
func testsIn(t *testing.T, dir string) string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join("..", dir, "*_test.go"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no tests in %s: %v", dir, err)
	}
	var all strings.Builder
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		all.Write(b)
	}
	return all.String()
}
