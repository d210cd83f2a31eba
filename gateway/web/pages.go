package web

import (
	"bytes"
	"encoding/json"
	"fmt"
	"html/template"
	"maps"
	"slices"
	"strings"

	"golang.org/x/text/language"
)

// Language is a language of the site.
type Language struct {
	Tag  string // BCP 47
	Name string // in itself
}

// Languages are those the site is written in; the first one is for everyone else.
var Languages = []Language{
	{"en", "English"},
	{"pt-BR", "Português (Brasil)"},
	{"de", "Deutsch"},
	{"ko", "한국어"},
	{"ja", "日本語"},
}

var matcher = language.NewMatcher(func() []language.Tag {
	tags := make([]language.Tag, len(Languages))
	for i, l := range Languages {
		tags[i] = language.MustParse(l.Tag)
	}
	return tags
}())

// maxAcceptLanguage bounds the header that is looked at.
const maxAcceptLanguage = 512

// Choose returns the language for a person: the one chosen before if it is one of Languages, else the best for the
// Accept-Language header.
func Choose(chosen, acceptLanguage string) string {
	for _, l := range Languages {
		if l.Tag == chosen {
			return l.Tag
		}
	}
	if len(acceptLanguage) > maxAcceptLanguage {
		acceptLanguage = ""
	}
	wanted, _, err := language.ParseAcceptLanguage(acceptLanguage)
	if err != nil {
		wanted = nil
	}
	_, i, _ := matcher.Match(wanted...)
	return Languages[i].Tag
}

// Pages are the names of the pages; each has a template pages/NAME.html.
var Pages = []string{"playground", "run", "shared", "ops"}

// message is one text: a string, or one for each plural category of the language (CLDR).
type message struct {
	text   string
	plural map[string]string
}

func (m *message) UnmarshalJSON(b []byte) error {
	if len(b) > 0 && b[0] == '{' {
		return json.Unmarshal(b, &m.plural)
	}
	return json.Unmarshal(b, &m.text)
}

// catalogue is one language's texts by key.
type catalogue map[string]message

func readCatalogues() (map[string]catalogue, error) {
	all := map[string]catalogue{}
	for _, l := range Languages {
		b, err := files.ReadFile("i18n/" + l.Tag + ".json")
		if err != nil {
			return nil, fmt.Errorf("read texts: %w", err)
		}
		var c catalogue
		if err := json.Unmarshal(b, &c); err != nil {
			return nil, fmt.Errorf("texts in %s: %w", l.Tag, err)
		}
		all[l.Tag] = c
	}
	return all, nil
}

// renderPages makes every page in every language.
func (s *Site) renderPages(catalogues map[string]catalogue) (map[string]map[string]*File, error) {
	pages := map[string]map[string]*File{}
	for _, name := range Pages {
		pages[name] = map[string]*File{}
		for _, l := range Languages {
			body, err := s.renderPage(name, l, func(key string) (string, error) {
				m, ok := catalogues[l.Tag][key]
				if !ok {
					return "", fmt.Errorf("no text %q in %s", key, l.Tag)
				}
				return m.text, nil
			})
			if err != nil {
				return nil, err
			}
			f, err := newFile("text/html; charset=utf-8", body)
			if err != nil {
				return nil, fmt.Errorf("page %s: %w", name, err)
			}
			pages[name][l.Tag] = &f
		}
	}
	return pages, nil
}

// renderPage makes one page, with texts from t.
func (s *Site) renderPage(name string, l Language, t func(key string) (string, error)) ([]byte, error) {
	tmpl, err := template.New("base.html").Funcs(template.FuncMap{
		"t":     t,
		"asset": s.Address,
	}).ParseFS(files, "pages/base.html", "pages/parts.html", "pages/"+name+".html")
	if err != nil {
		return nil, fmt.Errorf("parse page %s: %w", name, err)
	}
	var b bytes.Buffer
	err = tmpl.Execute(&b, map[string]any{"Page": name, "Language": l.Tag, "Languages": Languages})
	if err != nil {
		return nil, fmt.Errorf("render page %s in %s: %w", name, l.Tag, err)
	}
	// Blank lines of the template's own control structures.
	lines := slices.DeleteFunc(strings.Split(b.String(), "\n"), func(line string) bool { return strings.TrimSpace(line) == "" })
	return []byte(strings.Join(lines, "\n") + "\n"), nil
}

func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }
