package replay

import (
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"text/template"
)

// maxText bounds the text that a template may write.
const maxText = 256 << 10

// Result is what a tool call gave, for templates.
type Result struct {
	// Text is the whole content of the tool's message.
	Text string
	// ExitCode is the command's, or -1 when the result has none.
	ExitCode int
	// Output is the text behind the line with the exit code.
	Output string
}

// results are the tool results of one request, by tool call id.
type results map[string]string

var exitLine = regexp.MustCompile(`^exit code (-?[0-9]{1,9})\b[^\n]*(?:\n|$)`)

func (r results) result(id string) (Result, error) {
	text, ok := r[id]
	if !ok {
		return Result{}, fmt.Errorf("the request has no result of tool call %q", id)
	}
	m := exitLine.FindStringSubmatchIndex(text)
	if m == nil {
		return Result{Text: text, ExitCode: -1, Output: text}, nil
	}
	code, err := strconv.Atoi(text[m[2]:m[3]])
	if err != nil {
		return Result{}, fmt.Errorf("exit code of tool call %q: %w", id, err)
	}
	return Result{Text: text, ExitCode: code, Output: text[m[1]:]}, nil
}

func newTemplate(text string) (*template.Template, error) {
	return template.New("text").Option("missingkey=error").Funcs(template.FuncMap{
		"result":   results(nil).result, // replaced at execution
		"line":     line,
		"lines":    lines,
		"match":    match,
		"cell":     cell,
		"trim":     strings.TrimSpace,
		"contains": func(part, s string) bool { return strings.Contains(s, part) },
	}).Parse(text)
}

// execute fills the template from the results of one request.
func (r results) execute(t *template.Template) (string, error) {
	t, err := t.Clone()
	if err != nil {
		return "", err
	}
	var b limitedBuilder
	if err := t.Funcs(template.FuncMap{"result": r.result}).Execute(&b, nil); err != nil {
		return "", err
	}
	return b.String(), nil
}

func lines(s string) []string {
	s = strings.TrimSuffix(s, "\n")
	if s == "" {
		return nil
	}
	return strings.Split(s, "\n")
}

func line(n int, s string) string {
	all := lines(s)
	if n < 0 {
		n += len(all) + 1
	}
	if n < 1 || n > len(all) {
		return ""
	}
	return strings.TrimSuffix(all[n-1], "\r")
}

func match(pattern, s string) (string, error) {
	re, err := regexp.Compile(pattern)
	if err != nil {
		return "", err
	}
	for _, l := range lines(s) {
		if re.MatchString(l) {
			return strings.TrimSuffix(l, "\r"), nil
		}
	}
	return "", nil
}

// cell is one element of a JSON array, from 1, as text.
func cell(n int, s string) (string, error) {
	var row []json.RawMessage
	if err := json.Unmarshal([]byte(s), &row); err != nil {
		return "", fmt.Errorf("cell %d: %w", n, err)
	}
	if n < 1 || n > len(row) {
		return "", nil
	}
	var text string
	if json.Unmarshal(row[n-1], &text) == nil {
		return text, nil
	}
	return string(row[n-1]), nil
}

var errTooMuchText = errors.New("the template writes too much text")

// limitedBuilder is a strings.Builder that refuses more than maxText bytes.
type limitedBuilder struct {
	strings.Builder
}

func (b *limitedBuilder) Write(p []byte) (int, error) {
	if b.Len()+len(p) > maxText {
		return 0, errTooMuchText
	}
	return b.Builder.Write(p)
}
