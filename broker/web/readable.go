package web

import (
	"net/url"
	"strings"

	readability "codeberg.org/readeck/go-readability/v2"
	"golang.org/x/net/html"
	"golang.org/x/net/html/atom"
)

// maxElements bounds the pages that the readability library looks at: its work grows faster than the page.
const maxElements = 20_000

// readable is the title and the main text of a page; all its text where no main part can be found.
func readable(page string, u *url.URL) (title, text string) {
	doc, err := html.Parse(strings.NewReader(page)) // refuses pages whose elements lie too deep in each other
	if err == nil && count(doc) <= maxElements {
		parser := readability.NewParser()
		if article, err := parser.ParseDocument(doc, u); err == nil && article.Node != nil {
			var b strings.Builder
			if article.RenderText(&b) == nil && strings.TrimSpace(b.String()) != "" {
				return article.Title(), strings.TrimSpace(b.String())
			}
		}
	}
	return allText(page)
}

// count is the number of a document's elements.
func count(doc *html.Node) (n int) {
	for d := range doc.Descendants() {
		if d.Type == html.ElementNode {
			n++
		}
	}
	return n
}

// unread are elements whose text is not for readers.
var unread = map[atom.Atom]bool{atom.Script: true, atom.Style: true, atom.Noscript: true, atom.Template: true, atom.Iframe: true, atom.Textarea: true, atom.Title: true}

// inline are elements that do not end a line.
var inline = map[atom.Atom]bool{atom.A: true, atom.B: true, atom.I: true, atom.Em: true, atom.Strong: true, atom.Span: true, atom.Code: true, atom.Small: true, atom.Sub: true, atom.Sup: true, atom.U: true, atom.Q: true, atom.Abbr: true}

// allText is a page's title and all its text, read tag by tag without a tree.
func allText(page string) (title, text string) {
	var b strings.Builder
	var skip atom.Atom // the element whose text is left out
	z := html.NewTokenizer(strings.NewReader(page))
	for {
		switch z.Next() {
		case html.ErrorToken:
			return strings.TrimSpace(title), lines(b.String())
		case html.TextToken:
			switch {
			case skip == atom.Title && title == "":
				title = string(z.Text())
			case skip == 0:
				b.Write(z.Text())
			}
		case html.StartTagToken:
			name, _ := z.TagName()
			a := atom.Lookup(name)
			if skip == 0 && unread[a] {
				skip = a
			}
			if !inline[a] {
				b.WriteByte('\n')
			}
		case html.EndTagToken:
			name, _ := z.TagName()
			a := atom.Lookup(name)
			if a == skip {
				skip = 0
			}
			if !inline[a] {
				b.WriteByte('\n')
			}
		case html.SelfClosingTagToken:
			b.WriteByte('\n')
		}
	}
}

// lines drops empty lines, and what is more than one space.
func lines(s string) string {
	var kept []string
	for line := range strings.Lines(s) {
		if line = strings.Join(strings.Fields(line), " "); line != "" {
			kept = append(kept, line)
		}
	}
	return strings.Join(kept, "\n")
}
