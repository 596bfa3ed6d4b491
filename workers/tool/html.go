package tool

import (
	"bytes"
	"strings"

	"golang.org/x/net/html"
	"golang.org/x/net/html/atom"
)

// htmlText returns the text of a page that a reader would see, a line for each
// block, and whether more than about limit bytes of it were there.
func htmlText(page []byte, limit int) (text string, more bool) {
	z := html.NewTokenizer(bytes.NewReader(page))
	var out writer
	var skip atom.Atom // the element that is left out, with all in it
	depth, pre := 0, 0
	for out.Len() <= limit {
		kind := z.Next()
		if kind == html.ErrorToken {
			return strings.TrimSpace(out.String()), false // the end: reading from memory does not fail
		}
		if kind == html.TextToken {
			if skip == 0 {
				out.text(z.Text(), pre > 0)
			}
			continue
		}
		if kind != html.StartTagToken && kind != html.EndTagToken && kind != html.SelfClosingTagToken {
			continue // a comment
		}
		name, _ := z.TagName()
		tag := atom.Lookup(name)
		switch {
		case skip != 0:
			if tag == skip && kind == html.StartTagToken {
				depth++
			} else if tag == skip && kind == html.EndTagToken {
				if depth--; depth == 0 {
					skip = 0
				}
			}
		case unseen[tag] && kind == html.StartTagToken:
			skip, depth = tag, 1
		case tag == atom.Pre && kind == html.StartTagToken:
			out.breakLine()
			pre++
		case tag == atom.Pre && kind == html.EndTagToken:
			out.breakLine()
			pre = max(pre-1, 0)
		case tag == atom.Td || tag == atom.Th:
			out.space = true
		case blockElements[tag]:
			out.breakLine()
		}
	}
	return strings.TrimSpace(out.String()), true
}

func set(tags ...atom.Atom) map[atom.Atom]bool {
	m := make(map[atom.Atom]bool, len(tags))
	for _, tag := range tags {
		m[tag] = true
	}
	return m
}

var (
	unseen = set(atom.Script, atom.Style, atom.Noscript, atom.Template, atom.Svg, atom.Iframe, atom.Object, atom.Canvas, atom.Noembed, atom.Noframes)

	blockElements = set(atom.Address, atom.Article, atom.Aside, atom.Blockquote, atom.Body, atom.Br, atom.Caption, atom.Dd, atom.Details, atom.Div, atom.Dl,
		atom.Dt, atom.Fieldset, atom.Figcaption, atom.Figure, atom.Footer, atom.Form, atom.H1, atom.H2, atom.H3, atom.H4, atom.H5, atom.H6, atom.Header,
		atom.Hr, atom.Li, atom.Main, atom.Nav, atom.Ol, atom.Option, atom.P, atom.Section, atom.Summary, atom.Table, atom.Title, atom.Tr, atom.Ul)
)

// writer joins text with its white space reduced to what separates.
type writer struct {
	strings.Builder
	space, line bool // owed before the next text
}

func (w *writer) breakLine() { w.line = true }

func (w *writer) text(b []byte, verbatim bool) {
	if verbatim {
		w.owed()
		w.Write(b)
		return
	}
	for len(b) > 0 {
		word := bytes.IndexFunc(b, isSpace)
		switch {
		case word < 0:
			word = len(b)
		case word == 0:
			w.space = true
			b = bytes.TrimLeftFunc(b, isSpace)
			continue
		}
		w.owed()
		w.Write(b[:word])
		b = b[word:]
	}
}

func (w *writer) owed() {
	switch {
	case w.Len() == 0:
	case w.line:
		w.WriteByte('\n')
	case w.space:
		w.WriteByte(' ')
	}
	w.line, w.space = false, false
}

// isSpace is white space that HTML collapses, and the no-break space.
func isSpace(r rune) bool {
	return r == ' ' || r == '\t' || r == '\n' || r == '\r' || r == '\f' || r == '\u00a0'
}
