package web

import (
	"encoding/json"
	"io/fs"
	"regexp"
	"slices"
	"strings"
	"testing"

	"golang.org/x/net/html"

	"github.com/ephemeral-run/ephemeral/docs/examples"
)

// pluralForms are the plural categories of the site's languages (CLDR 46, cardinal numbers).
var pluralForms = map[string][]string{
	"en": {"one", "other"}, "de": {"one", "other"}, "pt-BR": {"many", "one", "other"}, "ko": {"other"}, "ja": {"other"},
}

// sameEverywhere are the texts that some languages share with English: names, terms of the field, and formats.
var sameEverywhere = regexp.MustCompile(`^(nav\.playground|play\.(prompt|budget|shell|web)|event\.(shell|web)|run\.(web_cost|isolation)|link\.live|replay\.(place|speed|time)|share\.address|timeline\.(shell|web)|ops\.|timeline\.total)`)

var placeholder = regexp.MustCompile(`\{\w+\}`)

func texts(t *testing.T) map[string]catalogue {
	t.Helper()
	all, err := readCatalogues()
	if err != nil {
		t.Fatal(err)
	}
	return all
}

func TestLanguagesAreComplete(t *testing.T) {
	all := texts(t)
	english := all["en"]
	for _, l := range Languages {
		c := all[l.Tag]
		for key, m := range english {
			own, ok := c[key]
			switch {
			case !ok:
				t.Errorf("%s: no text %q", l.Tag, key)
			case (own.plural == nil) != (m.plural == nil):
				t.Errorf("%s: %q is plural in one language and not in the other", l.Tag, key)
			case own.plural != nil:
				checkPlural(t, l.Tag, key, m, own)
			default:
				checkText(t, l.Tag, key, m.text, own.text)
			}
		}
		for key := range c {
			if _, ok := english[key]; !ok {
				t.Errorf("%s: %q is not in English", l.Tag, key)
			}
		}
	}
}

func checkPlural(t *testing.T, language, key string, english, own message) {
	t.Helper()
	if got := sortedKeys(own.plural); !slices.Equal(got, pluralForms[language]) {
		t.Errorf("%s: %q has the forms %v, want %v", language, key, got, pluralForms[language])
	}
	for _, text := range own.plural {
		checkText(t, language, key, english.plural["other"], text)
	}
}

// checkText holds a text against the English one: the same placeholders, and other words.
func checkText(t *testing.T, language, key, english, own string) {
	t.Helper()
	if strings.TrimSpace(own) == "" {
		t.Errorf("%s: %q is empty", language, key)
	}
	names := func(s string) []string {
		found := placeholder.FindAllString(s, -1)
		slices.Sort(found)
		return slices.Compact(found)
	}
	if want, got := names(english), names(own); !slices.Equal(want, got) {
		t.Errorf("%s: %q has the placeholders %v, want %v", language, key, got, want)
	}
	if language != "en" && own == english && !sameEverywhere.MatchString(key) {
		t.Errorf("%s: %q is not translated: %q", language, key, own)
	}
}

// Every text of a page must come from the catalogue: what is left when those texts are taken out must have no words.
func TestPagesHaveNoTextOfTheirOwn(t *testing.T) {
	s, err := Load()
	if err != nil {
		t.Fatal(err)
	}
	allowed := regexp.MustCompile(`^(Ephemeral|eph_…|data\.csv|python3 -c 'print\(6 \* 7\)')$`)
	for _, name := range Pages {
		page, err := s.renderPage(name, Languages[0], func(key string) (string, error) { return "\x01" + key + "\x02", nil })
		if err != nil {
			t.Fatal(err)
		}
		doc, err := html.ParseWithOptions(strings.NewReader(string(page)), html.ParseOptionEnableScripting(false))
		if err != nil {
			t.Fatal(err)
		}
		own := regexp.MustCompile("\x01[^\x02]*\x02")
		check := func(where, text string) {
			for part := range strings.SplitSeq(own.ReplaceAllString(text, "\n"), "\n") {
				part = strings.Trim(part, " \t·")
				if regexp.MustCompile(`\pL`).MatchString(part) && !allowed.MatchString(part) {
					t.Errorf("%s: %s has untranslated text: %q", name, where, part)
				}
			}
		}
		for n := range doc.Descendants() {
			if n.Type == html.TextNode && n.Parent.Data != "option" {
				check("<"+n.Parent.Data+">", n.Data)
			}
			for _, a := range n.Attr {
				if slices.Contains([]string{"aria-label", "title", "alt", "placeholder", "data-yes", "data-no"}, a.Key) {
					check(a.Key, a.Val)
				}
			}
		}
	}
}

// literal is a string of a program that is no part of an import, in single quotes or backquotes.
var literal = regexp.MustCompile("'((?:[^'\\\\\n]|\\\\.)*)'|`((?:[^`\\\\]|\\\\.)*)`")

// A sentence in a program would be shown untranslated: strings with two words in a row, or that begin like a sentence, must
// be code. snippets.js holds programs.
func TestProgramsHaveNoTextOfTheirOwn(t *testing.T) {
	sentence := regexp.MustCompile(`\pL{2,} \pL{2,}|^\p{Lu}\p{Ll}+[ .!?:…]|^\p{Lu}\p{Ll}{3,}$`)
	code := regexp.MustCompile(`^(Authorization|Accept|Content-Type|Bearer |Infinity|Last-Event-ID|Idempotency-Key|no request|segmented small|quiet (copy|danger|button)|card (.*)|link .*|run-line run-sub|hint split-costs|exit bad|end (good|bad)|model bad|call bad|machine (warn|bad)|noopener noreferrer nofollow|GET|POST|PUT|DELETE|KVM|run-page)`)
	inserted := regexp.MustCompile(`\$\{[^}]*\}`)
	comment := regexp.MustCompile(`(?m)(^|[^:'"])//.*$|/\*.*?\*/`)
	err := fs.WalkDir(files, "assets/js", func(p string, _ fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(p, ".js") || strings.HasSuffix(p, "snippets.js") {
			return err
		}
		b, err := files.ReadFile(p)
		if err != nil {
			return err
		}
		for _, m := range literal.FindAllStringSubmatch(comment.ReplaceAllString(string(b), "$1"), -1) {
			text := inserted.ReplaceAllString(m[1]+m[2], "")
			if sentence.MatchString(text) && !code.MatchString(text) {
				t.Errorf("%s: %q looks like a text: take it from the catalogue", p, text)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// Every key that a program names exists, and every key is named by someone.
func TestKeysAreUsed(t *testing.T) {
	english := texts(t)["en"]
	var source strings.Builder
	for _, dir := range []string{"assets/js", "pages"} {
		err := fs.WalkDir(files, dir, func(p string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() {
				return err
			}
			b, err := files.ReadFile(p)
			source.Write(b)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, m := range regexp.MustCompile(`\bt[n]?\('([\w.-]+)'|\{\{t "([\w.-]+)"`).FindAllStringSubmatch(source.String(), -1) {
		key := m[1] + m[2]
		if _, ok := english[key]; !ok {
			t.Errorf("a page names %q, which is no text", key)
		}
	}
	// Families whose last part comes from the data.
	family := regexp.MustCompile(`^(state|event|stage|outcome|fault|problem|link|example|run|share|result|ops)\.`)
	for key := range english {
		if !strings.Contains(source.String(), "'"+key+"'") && !strings.Contains(source.String(), `"`+key+`"`) && !family.MatchString(key) {
			t.Errorf("nobody uses the text %q", key)
		}
	}
}

func TestExamplesAreOffered(t *testing.T) {
	english := texts(t)["en"]
	s, err := Load()
	if err != nil {
		t.Fatal(err)
	}
	var list []struct {
		Name    string
		Request map[string]any
	}
	if err := json.Unmarshal(s.assets["examples.json"].Body, &list); err != nil {
		t.Fatal(err)
	}
	for i, e := range list {
		if e.Name != shownExamples[i] || e.Request["max_cost_micros"] == nil {
			t.Errorf("example %d: %+v", i, e)
		}
		for _, part := range []string{".title", ".text"} {
			if _, ok := english["example."+e.Name+part]; !ok {
				t.Errorf("no text example.%s%s", e.Name, part)
			}
		}
	}
	dirs, err := fs.ReadDir(examples.Files, ".")
	if err != nil || len(dirs) < len(list) {
		t.Errorf("%d examples: %v", len(dirs), err)
	}
}

func TestChoose(t *testing.T) {
	for _, c := range []struct{ chosen, accept, want string }{
		{"", "", "en"}, {"ko", "de", "ko"}, {"xx", "de-AT,en;q=0.5", "de"}, {"", "pt", "pt-BR"}, {"", "pt-PT,ja;q=0.4", "pt-BR"},
		{"", "fr,ja;q=0.8,en;q=0.2", "ja"}, {"", "fr", "en"}, {"", "ko-KR,ko;q=0.9", "ko"}, {"", "not a language;;;q=", "en"},
		{"", strings.Repeat("de,", 1000), "en"}, {"../../etc", "", "en"},
	} {
		if got := Choose(c.chosen, c.accept); got != c.want {
			t.Errorf("Choose(%q, %.20q) = %s, want %s", c.chosen, c.accept, got, c.want)
		}
	}
}

// firstPaint bounds what a browser needs to show a page, in bytes as sent.
const firstPaint = 100_000

// TestFirstPaintIsSmall adds up the page, the style and every module and text that it loads.
func TestFirstPaintIsSmall(t *testing.T) {
	s, err := Load()
	if err != nil {
		t.Fatal(err)
	}
	imports := regexp.MustCompile(`from '(\.[^']+)'`)
	for _, page := range Pages {
		for _, l := range Languages {
			seen := map[string]bool{}
			var add func(name string)
			size := 0
			add = func(name string) {
				if seen[name] {
					return
				}
				seen[name] = true
				f, ok := s.assets[name]
				if !ok {
					t.Fatalf("%s loads %s, which does not exist", page, name)
				}
				size += sent(f)
				for _, m := range imports.FindAllStringSubmatch(string(f.Body), -1) {
					if strings.HasPrefix(m[1], "../") {
						add(strings.TrimPrefix(m[1], "../"))
					} else {
						add("js/" + strings.TrimPrefix(m[1], "./"))
					}
				}
			}
			size += sent(*s.Page(page, l.Tag))
			add("style.css")
			add("icon.svg")
			add("i18n/" + l.Tag + ".json")
			add("js/page-" + page + ".js")
			if size >= firstPaint {
				t.Errorf("%s in %s needs %d bytes, want below %d", page, l.Tag, size, firstPaint)
			}
			t.Logf("%s in %s: %d bytes", page, l.Tag, size)
		}
	}
}

func sent(f File) int {
	if f.Gzip != nil {
		return len(f.Gzip)
	}
	return len(f.Body)
}
