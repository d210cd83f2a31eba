package images

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

const tools = `
from: base
packages: [ripgrep, bash, gcc]
files:
  - path: /opt/tools/hello
    mode: "0755"
    content: |
      #!/bin/sh
      echo hello
  - path: /etc/tools.conf
    source: conf/tools.conf
commands:
  - ln -s /opt/tools/hello /usr/local/bin/hello
`

func TestReadRecipe(t *testing.T) {
	dir := t.TempDir()
	put(t, filepath.Join(dir, "recipe.yaml"), []byte(tools))
	put(t, filepath.Join(dir, "conf", "tools.conf"), []byte("x = 1\n"))
	r, err := ReadRecipe("tools", filepath.Join(dir, "recipe.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	if r.Name != "tools" || !slices.IsSorted(r.Packages) || !slices.Contains(r.Packages, "ripgrep") || !slices.Contains(r.Packages, "python3") ||
		len(slices.Compact(slices.Clone(r.Packages))) != len(r.Packages) || len(r.Commands) != 1 || len(r.Files) != 2 || r.Kernel != Base().Kernel {
		t.Errorf("%+v", r)
	}
	work := t.TempDir()
	hook, err := r.writeHook(work)
	if err != nil || hook != filepath.Join(work, "recipe.sh") {
		t.Fatalf("%s, %v", hook, err)
	}
	var got []string
	for tr := tar.NewReader(strings.NewReader(get(t, filepath.Join(work, "recipe.tar")))); ; {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		must(t, err)
		b, err := io.ReadAll(tr)
		must(t, err)
		got = append(got, h.FileInfo().Mode().String()+" "+h.Name+" "+string(b))
	}
	if want := []string{"-rw-r--r-- etc/tools.conf x = 1\n", "-rwxr-xr-x opt/tools/hello #!/bin/sh\necho hello\n"}; !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
	if !strings.Contains(get(t, filepath.Join(work, "commands.sh")), "ln -s /opt/tools/hello") {
		t.Error("the command is missing")
	}
	if hook, err := Base().writeHook(t.TempDir()); hook != "" || err != nil {
		t.Errorf("base has a hook: %q, %v", hook, err)
	}
}

func TestRecipesRefused(t *testing.T) {
	for doc, want := range map[string]string{
		"package: [x]":                                                 "package",
		"packages: x":                                                  "",
		"from: other":                                                  "only base",
		"packages: ['-o=Dir::Etc=x']":                                  "package name",
		"packages: ['x,y']":                                            "package name",
		"commands: ['']":                                               "command",
		"memory_mib: -1":                                               "memory_mib",
		"memory_mib: 262145":                                           "at most 262144",
		"files: [{path: a, content: x}]":                               "absolute path",
		"files: [{path: /../a, content: x}]":                           "absolute path",
		"files: [{path: /a/, content: x}]":                             "absolute path",
		"files: [{path: /, content: x}]":                               "absolute path",
		"files: [{path: /a}]":                                          "one of content and source",
		"files: [{path: /a, content: x, source: y}]":                   "one of content and source",
		"files: [{path: /a, source: ../secret}]":                       "escapes",
		"files: [{path: /a, source: link}]":                            "escapes",
		"files: [{path: /a, source: .}]":                               "regular",
		"files: [{path: /a, content: x, mode: '4755'}]":                "mode",
		"files: [{path: /a, content: x, mode: rw}]":                    "mode",
		"files: [{path: /a, content: x}, {path: /a, content: y}]":      "twice",
		"packages: [" + strings.Repeat("xx,", maxRecipeList+1) + "xx]": "more than",
		"commands: ['" + strings.Repeat("x", maxRecipeFile) + "']":     "larger than",
	} {
		dir := filepath.Join(t.TempDir(), "in")
		put(t, filepath.Join(dir, "r.yaml"), []byte(doc))
		put(t, filepath.Join(dir, "..", "secret"), []byte("s"))
		must(t, os.Symlink("../secret", filepath.Join(dir, "link")))
		if _, err := ReadRecipe("x", filepath.Join(dir, "r.yaml")); !errors.Is(err, ErrRecipe) || !strings.Contains(err.Error(), want) {
			t.Errorf("%.80s: %v, want %q", doc, err, want)
		}
	}
}

// The same recipe gives the same inputs and the same archive of files, in whatever order packages and files are written; another
// package, file, mode or command gives other inputs.
func TestRecipeIsReproducible(t *testing.T) {
	parse := func(doc string) Recipe {
		t.Helper()
		r, err := parseRecipe("x", []byte(doc), nil)
		must(t, err)
		return r
	}
	sum := func(r Recipe) (string, []byte) {
		t.Helper()
		in, err := r.inputs()
		must(t, err)
		var b bytes.Buffer
		must(t, r.writeFiles(&b))
		return in, b.Bytes()
	}
	one := `{packages: [aa, bb], files: [{path: /a, content: x}, {path: /b, content: y}], commands: ["true"]}`
	in, files := sum(parse(one))
	if in2, files2 := sum(parse(`{files: [{path: /b, content: y, mode: "0644"}, {path: /a, content: x}], commands: ["true"], packages: [bb, aa, aa, bash]}`)); in != in2 || !bytes.Equal(files, files2) {
		t.Error("the order makes a difference")
	}
	for _, other := range []string{
		`{packages: [aa], files: [{path: /a, content: x}, {path: /b, content: y}], commands: ["true"]}`,
		`{packages: [aa, bb], files: [{path: /a, content: z}, {path: /b, content: y}], commands: ["true"]}`,
		`{packages: [aa, bb], files: [{path: /a, content: x, mode: "0600"}, {path: /b, content: y}], commands: ["true"]}`,
		`{packages: [aa, bb], files: [{path: /a, content: x}, {path: /b, content: y}], commands: ["false"]}`,
	} {
		if in2, _ := sum(parse(other)); in == in2 {
			t.Errorf("%s has the inputs of %s", other, one)
		}
	}
	if none, err := parseRecipe("base", nil, nil); err != nil {
		t.Error(err)
	} else if a, _ := sum(none); a != func() string { b := Base(); s, _ := b.inputs(); return s }() {
		t.Error("an empty recipe is not base")
	}
}

// Two builds of the same inputs have the same digest; only the manifest's time differs.
func TestSameInputsSameDigest(t *testing.T) {
	a, b := newBuilding(t), newBuilding(t)
	one, two := a.mustBuild(t), b.mustBuild(t)
	if one.Digest != two.Digest || get(t, one.Initramfs) != get(t, two.Initramfs) {
		t.Errorf("digests %s and %s", one.Digest, two.Digest)
	}
	m, err := ReadManifest(filepath.Dir(one.Kernel))
	must(t, err)
	n, err := ReadManifest(filepath.Dir(two.Kernel))
	must(t, err)
	n.BuiltAt = m.BuiltAt
	da, db := t.TempDir(), t.TempDir()
	must(t, m.write(da))
	must(t, n.write(db))
	if get(t, filepath.Join(da, manifestFile)) != get(t, filepath.Join(db, manifestFile)) {
		t.Error("the manifests differ in more than the time")
	}
}

// A recipe that is accepted can be built: its names are clean, its files bounded and in order.
func FuzzRecipe(f *testing.F) {
	f.Add([]byte(tools))
	f.Add([]byte(`{"packages":["a"],"commands":["x"]}`))
	f.Fuzz(func(t *testing.T, doc []byte) {
		r, err := parseRecipe("x", doc, func(string) ([]byte, error) { return []byte("source"), nil })
		if err != nil {
			return
		}
		for _, p := range r.Packages {
			if !packageRE.MatchString(p) {
				t.Errorf("package %q", p)
			}
		}
		for i, file := range r.Files {
			if !strings.HasPrefix(file.Path, "/") || strings.Contains(file.Path, "/../") || i > 0 && r.Files[i-1].Path >= file.Path {
				t.Errorf("file %q", file.Path)
			}
		}
		var b bytes.Buffer
		if err := r.writeFiles(&b); err != nil {
			t.Error(err)
		}
	})
}

func TestRecipePackagesAreASet(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		names := rapid.SliceOfN(rapid.StringMatching(`[a-z]{2,5}`), 0, 20).Draw(t, "names")
		build := func(names []string) string {
			r, err := parseRecipe("x", []byte("packages: ['"+strings.Join(append([]string{"bash"}, names...), "','")+"']"), nil)
			if err != nil {
				t.Fatal(err)
			}
			in, err := r.inputs()
			if err != nil {
				t.Fatal(err)
			}
			return in
		}
		if build(names) != build(rapid.Permutation(names).Draw(t, "order")) {
			t.Fatal("the order of packages makes a difference")
		}
	})
}
