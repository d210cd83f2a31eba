package web

import (
	"net/url"
	"strings"

	readability "codeberg.org/readeck/go-readability/v2"
	"golang.org/x/net/html"
	"golang.org/x/net/html/atom"
)

// maxElements bounds the pages that the readability library looks at: its work grows faster than the page. maxDepth bounds
// how deep the elements of a page may lie in each other.
const (
	maxElements = 20_000
	maxDepth    = 500
)

// readable is the title and the main text of a page; all its text where no main part can be found.
func readable(page string, u *url.URL) (title, text string) {
	doc, err := html.Parse(strings.NewReader(page))
	if err != nil {
		return "", page
	}
	count, deep := measure(doc)
	if !deep && count <= maxElements {
		parser := readability.NewParser()
		if article, err := parser.ParseDocument(doc, u); err == nil && article.Node != nil {
			var b strings.Builder
			if article.RenderText(&b) == nil && strings.TrimSpace(b.String()) != "" {
				return article.Title(), strings.TrimSpace(b.String())
			}
		}
	}
	return allText(doc)
}

// measure counts a document's elements, and tells whether they are nested deeper than maxDepth.
func measure(doc *html.Node) (count int, deep bool) {
	depth := 0
	walk(doc, func(n *html.Node) bool {
		if n.Type == html.ElementNode {
			count++
		}
		depth++
		deep = deep || depth > maxDepth
		return true
	}, func(*html.Node) { depth-- })
	return count, deep
}

// walk visits a tree without recursion, since its depth is the page's choice. into tells whether to visit what is below.
func walk(root *html.Node, into func(*html.Node) bool, out func(*html.Node)) {
	n := root
	for n != nil {
		if into(n) && n.FirstChild != nil {
			n = n.FirstChild
			continue
		}
		for n != nil {
			out(n)
			if n == root {
				return
			}
			if n.NextSibling != nil {
				n = n.NextSibling
				break
			}
			n = n.Parent
		}
	}
}

// unread are elements whose text is not for readers.
var unread = map[atom.Atom]bool{atom.Script: true, atom.Style: true, atom.Noscript: true, atom.Template: true, atom.Iframe: true, atom.Svg: true, atom.Head: true}

// inline are elements that do not end a line.
var inline = map[atom.Atom]bool{atom.A: true, atom.B: true, atom.I: true, atom.Em: true, atom.Strong: true, atom.Span: true, atom.Code: true, atom.Small: true, atom.Sub: true, atom.Sup: true, atom.U: true, atom.Q: true, atom.Abbr: true}

// allText is a page's title and all its text.
func allText(doc *html.Node) (title, text string) {
	var b strings.Builder
	walk(doc, func(n *html.Node) bool {
		switch {
		case n.Type == html.TextNode:
			b.WriteString(n.Data)
		case n.DataAtom == atom.Title && n.FirstChild != nil && title == "":
			title = n.FirstChild.Data
		}
		return !unread[n.DataAtom] || n.DataAtom == atom.Head
	}, func(n *html.Node) {
		if n.Type == html.ElementNode && !inline[n.DataAtom] {
			b.WriteByte('\n')
		}
	})
	var lines []string
	for line := range strings.Lines(b.String()) {
		if line = strings.Join(strings.Fields(line), " "); line != "" {
			lines = append(lines, line)
		}
	}
	return strings.TrimSpace(title), strings.Join(lines, "\n")
}
