package images

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/goccy/go-yaml"
)

// Bounds of a recipe file and of what it names.
const (
	maxRecipeFile  = 1 << 20
	maxRecipeList  = 1000     // packages, files or commands
	maxRecipeBytes = 64 << 20 // of all files together
	maxCommandSize = 64 << 10
)

// ErrRecipe: the recipe file is not one.
var ErrRecipe = errors.New("recipe refused")

// RecipeFile is a file that a recipe adds to the root filesystem; it belongs to root.
type RecipeFile struct {
	Path   string `json:"path"`   // absolute
	Mode   string `json:"mode"`   // permission bits, octal
	SHA256 string `json:"sha256"` // of its content, hexadecimal

	data []byte
}

// recipeDocument is a recipe file as it is written: YAML, or JSON, which is YAML too.
type recipeDocument struct {
	From     string               `yaml:"from"`     // "base", the only one, and the default
	Packages []string             `yaml:"packages"` // Debian packages beside those of base
	Files    []recipeDocumentFile `yaml:"files"`
	Commands []string             `yaml:"commands"` // run as root in the root filesystem, in order, without network

	MemoryMiB int `yaml:"memory_mib"` // least memory of a machine
}

type recipeDocumentFile struct {
	Path    string  `yaml:"path"`
	Mode    string  `yaml:"mode"`    // default: 0644
	Content *string `yaml:"content"` // the file's text
	Source  string  `yaml:"source"`  // or a file to copy, relative to the recipe's directory
}

var packageRE = regexp.MustCompile(`^[a-z0-9][a-z0-9+.-]{1,127}$`)

// ReadRecipe reads the recipe of an image from a file. The order of packages makes no difference to the image. ErrRecipe.
func ReadRecipe(name, file string) (Recipe, error) {
	f, err := os.Open(file)
	if err != nil {
		return Recipe{}, fmt.Errorf("read recipe: %w", err)
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxRecipeFile+1))
	if err != nil {
		return Recipe{}, fmt.Errorf("read recipe %s: %w", file, err)
	}
	r, err := parseRecipe(name, b, func(source string) ([]byte, error) { return readSource(filepath.Dir(file), source) })
	if err != nil {
		return Recipe{}, fmt.Errorf("%w: %s: %w", ErrRecipe, file, err)
	}
	return r, nil
}

// readSource reads a file beside the recipe; symbolic links that lead out of its directory are refused.
func readSource(dir, source string) ([]byte, error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, err
	}
	defer root.Close()
	f, err := root.Open(source)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if fi, err := f.Stat(); err != nil || !fi.Mode().IsRegular() {
		return nil, errors.Join(err, fmt.Errorf("%s is not a regular file", source))
	}
	b, err := io.ReadAll(io.LimitReader(f, maxRecipeBytes+1))
	if err == nil && len(b) > maxRecipeBytes {
		err = fmt.Errorf("%s has more than %d MiB", source, maxRecipeBytes>>20)
	}
	return b, err
}

func parseRecipe(name string, b []byte, read func(source string) ([]byte, error)) (Recipe, error) {
	if len(b) > maxRecipeFile {
		return Recipe{}, fmt.Errorf("larger than %d KiB", maxRecipeFile>>10)
	}
	var d recipeDocument
	if err := yaml.UnmarshalWithOptions(b, &d, yaml.Strict()); err != nil && !errors.Is(err, io.EOF) {
		return Recipe{}, err
	}
	r := Base()
	r.Name = name
	if d.From != "" && d.From != "base" {
		return Recipe{}, fmt.Errorf("from is %.64q: only base is there to start from", d.From)
	}
	if max(len(d.Packages), len(d.Files), len(d.Commands)) > maxRecipeList {
		return Recipe{}, fmt.Errorf("more than %d packages, files or commands", maxRecipeList)
	}
	for _, p := range d.Packages {
		if !packageRE.MatchString(p) {
			return Recipe{}, fmt.Errorf("package name %.64q", p)
		}
	}
	r.Packages = slices.Compact(slices.Sorted(slices.Values(append(r.Packages, d.Packages...))))
	for _, c := range d.Commands {
		if strings.TrimSpace(c) == "" || len(c) > maxCommandSize || strings.ContainsRune(c, 0) || !utf8.ValidString(c) {
			return Recipe{}, fmt.Errorf("command %.64q: want text of at most %d KiB", c, maxCommandSize>>10)
		}
	}
	r.Commands = d.Commands
	if r.MemoryMiB = d.MemoryMiB; r.MemoryMiB < 0 || r.MemoryMiB > mostMemoryMiB {
		return Recipe{}, fmt.Errorf("memory_mib is %d: want at most %d", r.MemoryMiB, mostMemoryMiB)
	}
	total, seen := 0, map[string]bool{}
	for _, f := range d.Files {
		file, err := f.load(read)
		if err != nil {
			return Recipe{}, fmt.Errorf("file %.200q: %w", f.Path, err)
		}
		if total += len(file.data); total > maxRecipeBytes {
			return Recipe{}, fmt.Errorf("files of more than %d MiB together", maxRecipeBytes>>20)
		}
		if seen[file.Path] {
			return Recipe{}, fmt.Errorf("file %.200q is there twice", f.Path)
		}
		seen[file.Path] = true
		r.Files = append(r.Files, file)
	}
	slices.SortFunc(r.Files, func(a, b RecipeFile) int { return strings.Compare(a.Path, b.Path) })
	return r, nil
}

func (f recipeDocumentFile) load(read func(string) ([]byte, error)) (RecipeFile, error) {
	out := RecipeFile{Path: f.Path, Mode: f.Mode}
	clean := path.Clean(f.Path)
	if !path.IsAbs(f.Path) || clean != f.Path || clean == "/" || len(clean) > 4000 || strings.ContainsFunc(clean, func(r rune) bool { return r < ' ' }) || !utf8.ValidString(clean) {
		return out, errors.New(`want an absolute path without ".", ".." and "//"`)
	}
	if out.Mode == "" {
		out.Mode = "0644"
	}
	if n, err := strconv.ParseUint(out.Mode, 8, 32); err != nil || n > 0o777 {
		return out, fmt.Errorf("mode %.16q: want permission bits in octal, such as 0755", f.Mode)
	}
	switch {
	case (f.Content == nil) == (f.Source == ""):
		return out, errors.New("want one of content and source")
	case f.Content != nil:
		out.data = []byte(*f.Content)
	default:
		var err error
		if out.data, err = read(f.Source); err != nil {
			return out, err
		}
	}
	sum := sha256.Sum256(out.data)
	out.SHA256 = hex.EncodeToString(sum[:])
	return out, nil
}

// recipeHook puts the files of a recipe into the root filesystem and runs its commands. It runs after customize.sh, so the user
// worker is there. The files are unpacked in there, so that a symbolic link leads nowhere else; commands have no network, so that
// the same recipe of the same packages gives the same files, and what they leave behind by the way is removed.
const recipeHook = `#!/bin/sh
set -eu
root=$1
work=$(dirname "$0")
chroot "$root" tar --extract --keep-directory-symlink --same-permissions --file - <"$work/recipe.tar"
if [ -s "$work/commands.sh" ]; then
	PYTHONDONTWRITEBYTECODE=1 PYTHONHASHSEED=0 HOME=/root \
		unshare --net --pid --fork --kill-child chroot "$root" /bin/bash -euo pipefail -s <"$work/commands.sh"
	chroot "$root" dpkg-query -W -f '${Package} ${Version}\n' >"$work/packages"
	rm -rf "$root"/var/log/* "$root"/var/cache/* "$root"/tmp/* "$root"/run/* "$root"/var/lib/dpkg/*-old \
		"$root"/etc/passwd- "$root"/etc/group- "$root"/etc/shadow- "$root"/etc/gshadow- "$root"/etc/subuid- "$root"/etc/subgid-
fi
`

// writeHook writes what recipeHook needs into work and returns its path; "" when the recipe adds nothing.
func (r Recipe) writeHook(work string) (string, error) {
	if len(r.Files) == 0 && len(r.Commands) == 0 {
		return "", nil
	}
	var archive bytes.Buffer
	if err := r.writeFiles(&archive); err != nil {
		return "", err
	}
	var commands strings.Builder
	for _, c := range r.Commands {
		fmt.Fprintf(&commands, "(\n%s\n) </dev/null\n", c)
	}
	hook := filepath.Join(work, "recipe.sh")
	for name, b := range map[string][]byte{"recipe.tar": archive.Bytes(), "commands.sh": []byte(commands.String()), "recipe.sh": []byte(recipeHook)} {
		if err := writeFile(filepath.Join(work, name), b); err != nil {
			return "", err
		}
	}
	return hook, nil
}

// writeFiles writes the recipe's files as an archive.
func (r Recipe) writeFiles(w io.Writer) error {
	tw := tar.NewWriter(w)
	for _, f := range r.Files {
		mode, err := strconv.ParseUint(f.Mode, 8, 32)
		if err != nil {
			return fmt.Errorf("mode of %s: %w", f.Path, err)
		}
		h := &tar.Header{Typeflag: tar.TypeReg, Name: strings.TrimPrefix(f.Path, "/"), Mode: int64(fs.FileMode(mode).Perm()), Size: int64(len(f.data)), ModTime: fixedTime}
		if err := tw.WriteHeader(h); err != nil {
			return fmt.Errorf("write file %s of the recipe: %w", f.Path, err)
		}
		if _, err := tw.Write(f.data); err != nil {
			return fmt.Errorf("write file %s of the recipe: %w", f.Path, err)
		}
	}
	return tw.Close()
}
