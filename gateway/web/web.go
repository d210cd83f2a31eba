// Package web is what people look at: the playground, a run's timeline and the operator's page, in five languages. It is
// static: everything it shows of runs comes from the API, asked with the key that a person has typed in.
//
// Files are served under an address that holds a hash of all of them, so that a browser keeps them for ever and never mixes
// two releases. Pages are rendered once for each language, when the server starts.
package web

import (
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"mime"
	"path"
	"strings"
	"sync"

	"github.com/ephemeral-run/ephemeral/docs/examples"
)

//go:embed pages assets i18n
var files embed.FS

// AssetPrefix is where the assets are served: this, the version, and the asset's name.
const AssetPrefix = "/assets/"

// shownExamples are the example requests that the playground offers, in this order. Each has a title and a text in every
// language.
var shownExamples = []string{"sandbox-proof", "csv-analysis", "budget", "billing", "warehouse"}

// File is one answer, as it is and compressed.
type File struct {
	Type string // media type
	Body []byte
	Gzip []byte // nil where compression does not pay
	ETag string
}

// Site holds every page and asset. It does not change and may be used by many goroutines.
type Site struct {
	version string
	assets  map[string]File             // by name below the version, e.g. "js/run.js"
	pages   map[string]map[string]*File // by page and language
}

// Load returns the site, rendered at the first call. It fails only when the embedded files are not what this package
// expects.
var Load = sync.OnceValues(render)

func render() (*Site, error) {
	catalogues, err := readCatalogues()
	if err != nil {
		return nil, err
	}
	s := &Site{assets: map[string]File{}}
	raw, err := readAssets()
	if err != nil {
		return nil, err
	}
	s.version = versionOf(raw)
	for name, body := range raw {
		f, err := newFile(typeOf(name), body)
		if err != nil {
			return nil, fmt.Errorf("asset %s: %w", name, err)
		}
		s.assets[name] = f
	}
	if s.pages, err = s.renderPages(catalogues); err != nil {
		return nil, err
	}
	return s, nil
}

// Asset returns the asset of this release at version/name.
func (s *Site) Asset(address string) (File, bool) {
	version, name, _ := strings.Cut(address, "/")
	if version != s.version {
		return File{}, false
	}
	f, ok := s.assets[name]
	return f, ok
}

// Page returns a page in a language of Languages; the page must be one of Pages.
func (s *Site) Page(name, language string) *File { return s.pages[name][language] }

// readAssets returns everything that is served below the version.
func readAssets() (map[string][]byte, error) {
	assets := map[string][]byte{}
	for _, dir := range []string{"assets", "i18n"} {
		err := fs.WalkDir(files, dir, func(p string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() {
				return err
			}
			body, err := files.ReadFile(p)
			assets[strings.TrimPrefix(p, "assets/")] = body
			return err
		})
		if err != nil {
			return nil, fmt.Errorf("read embedded files: %w", err)
		}
	}
	list, err := exampleList()
	if err != nil {
		return nil, err
	}
	assets["examples.json"] = list
	return assets, nil
}

// exampleList is the example requests as one JSON document.
func exampleList() ([]byte, error) {
	type example struct {
		Name    string          `json:"name"`
		Request json.RawMessage `json:"request"`
	}
	list := make([]example, 0, len(shownExamples))
	for _, name := range shownExamples {
		request, err := examples.Files.ReadFile(path.Join(name, "request.json"))
		if err != nil {
			return nil, fmt.Errorf("read example: %w", err)
		}
		if !json.Valid(request) {
			return nil, fmt.Errorf("example %s: %w", name, errors.New("request.json is not JSON"))
		}
		list = append(list, example{name, request})
	}
	b, err := json.Marshal(list)
	if err != nil {
		return nil, fmt.Errorf("encode examples: %w", err)
	}
	return b, nil
}

// versionOf is a hash of all assets.
func versionOf(assets map[string][]byte) string {
	h := sha256.New()
	for _, name := range sortedKeys(assets) {
		fmt.Fprintf(h, "%s %d\n", name, len(assets[name]))
		h.Write(assets[name])
	}
	return hex.EncodeToString(h.Sum(nil))[:16]
}

func typeOf(name string) string {
	switch ext := path.Ext(name); ext {
	case ".js":
		return "text/javascript; charset=utf-8"
	case ".txt":
		return "text/plain; charset=utf-8"
	case ".svg":
		return "image/svg+xml"
	case ".json":
		return "application/json"
	default:
		return mime.TypeByExtension(ext)
	}
}

func newFile(mediaType string, body []byte) (File, error) {
	sum := sha256.Sum256(body)
	f := File{Type: mediaType, Body: body, ETag: `"` + hex.EncodeToString(sum[:12]) + `"`}
	var b bytes.Buffer
	z, err := gzip.NewWriterLevel(&b, gzip.BestCompression)
	if err != nil {
		return File{}, fmt.Errorf("compress: %w", err)
	}
	if _, err := z.Write(body); err != nil {
		return File{}, fmt.Errorf("compress: %w", err)
	}
	if err := z.Close(); err != nil {
		return File{}, fmt.Errorf("compress: %w", err)
	}
	if b.Len() < len(body) {
		f.Gzip = b.Bytes()
	}
	return f, nil
}

// Address is where an asset of this release is served.
func (s *Site) Address(name string) string { return AssetPrefix + s.version + "/" + name }
