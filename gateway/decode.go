package gateway

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/go-json-experiment/json/jsontext"
)

// maxInteger is the greatest integer that every JSON implementation keeps exactly (RFC 8259, section 6).
const maxInteger = 1<<53 - 1

// decoder reads one JSON object strictly: duplicate keys, invalid UTF-8 and trailing data end it; unknown fields and
// wrong types are collected, so that a client learns of all of them at once.
type decoder struct {
	json   *jsontext.Decoder
	fields []FieldError
}

// decodeObject reads body as one object, and may write to it. It calls member for each member with its name; member reads exactly one value
// or returns errUnknownField. The result is nil, or a problem that names every field at fault.
func decodeObject(body []byte, member func(d *decoder, name string) error) (*decoder, error) {
	d := &decoder{json: jsontext.NewDecoder(bytes.NewBuffer(body))} // of a buffer it makes no copy
	switch d.json.PeekKind() {
	case '{':
	case '[', '"', '0', 't', 'f', 'n':
		return nil, problem(CodeInvalidJSON, "The request body must be a JSON object.")
	}
	if err := d.object("", member); err != nil {
		return nil, syntaxProblem(err)
	}
	if _, err := d.json.ReadToken(); err == nil {
		return nil, problem(CodeInvalidJSON, "The request body has data after the JSON object.")
	} else if !errors.Is(err, io.EOF) {
		return nil, syntaxProblem(err)
	}
	return d, nil
}

// errUnknownField tells object that nobody knows the member.
var errUnknownField = errors.New("unknown field")

// object reads an object's members. path names the object; "" is the body.
func (d *decoder) object(path string, member func(d *decoder, name string) error) error {
	if !d.expect(path, '{', "an object") {
		return d.json.SkipValue()
	}
	if _, err := d.json.ReadToken(); err != nil {
		return err
	}
	for d.json.PeekKind() != '}' {
		name, err := d.json.ReadToken()
		if err != nil {
			return err
		}
		key := name.String()
		err = member(d, key)
		if errors.Is(err, errUnknownField) {
			d.fail(join(path, key), "is not a known field")
			err = d.json.SkipValue()
		}
		if err != nil {
			return err
		}
	}
	_, err := d.json.ReadToken()
	return err
}

// array reads an array's elements, each by element. More than limit elements are an error and are skipped.
func (d *decoder) array(path string, limit int, element func(d *decoder, path string) error) error {
	if !d.expect(path, '[', "an array") {
		return d.json.SkipValue()
	}
	if _, err := d.json.ReadToken(); err != nil {
		return err
	}
	n := 0
	for ; d.json.PeekKind() != ']'; n++ {
		var err error
		if n < limit {
			err = element(d, path+"["+strconv.Itoa(n)+"]")
		} else {
			err = d.json.SkipValue()
		}
		if err != nil {
			return err
		}
	}
	if n > limit {
		d.fail(path, fmt.Sprintf("has %d entries, at most %d are allowed", n, limit))
	}
	_, err := d.json.ReadToken()
	return err
}

// text reads a string.
func (d *decoder) text(path string, into *string) error {
	if !d.expect(path, '"', "a string") {
		return d.json.SkipValue()
	}
	v, err := d.json.ReadValue()
	switch {
	case err != nil:
		return err
	case bytes.IndexByte(v, '\\') < 0:
		*into = string(v[1 : len(v)-1])
		return nil
	}
	text, err := jsontext.AppendUnquote(make([]byte, 0, len(v)), v)
	*into = string(text)
	return err
}

// flag reads a boolean.
func (d *decoder) flag(path string, into *bool) error {
	if k := d.json.PeekKind(); k != 't' && k != 'f' {
		d.expect(path, 't', "true or false")
		return d.json.SkipValue()
	}
	t, err := d.json.ReadToken()
	if err == nil {
		*into = t.Bool()
	}
	return err
}

// number reads any number.
func (d *decoder) number(path string, into *float64) error {
	if !d.expect(path, '0', "a number") {
		return d.json.SkipValue()
	}
	v, err := d.json.ReadValue()
	if err != nil {
		return err
	}
	if *into, err = strconv.ParseFloat(string(v), 64); err != nil {
		d.fail(path, "must be a number of ordinary size")
	}
	return nil
}

// integer reads a whole number. 120, 120.0 and 1.2e2 are the same number in JSON.
func (d *decoder) integer(path string, into *int64) error {
	if !d.expect(path, '0', "an integer") {
		return d.json.SkipValue()
	}
	v, err := d.json.ReadValue()
	if err != nil {
		return err
	}
	f, err := strconv.ParseFloat(string(v), 64)
	if err != nil || f != math.Trunc(f) || math.Abs(f) > maxInteger {
		d.fail(path, "must be an integer")
		return nil
	}
	*into = int64(f)
	return nil
}

// expect tells whether the next value is of the kind and notes the field otherwise. A syntax error passes as
// expected: whoever reads next reports it.
func (d *decoder) expect(path string, kind jsontext.Kind, what string) bool {
	got := d.json.PeekKind()
	if got == kind || got == 0 {
		return true
	}
	d.fail(path, "must be "+what+", not "+kindName(got))
	return false
}

func (d *decoder) fail(path, detail string) {
	if len(d.fields) <= maxFieldErrors {
		d.fields = append(d.fields, FieldError{Field: path, Detail: detail})
	}
}

func kindName(k jsontext.Kind) string {
	switch k {
	case '{':
		return "an object"
	case '[':
		return "an array"
	case '"':
		return "a string"
	case '0':
		return "a number"
	case 'n':
		return "null"
	}
	return "a boolean"
}

// join makes the path of a member. Names come from the client: they are shortened and, if odd, quoted.
func join(path, name string) string {
	name = shorten(name)
	if path == "" {
		return name
	}
	return path + "." + name
}

// shorten bounds a client's text for use in an answer.
func shorten(s string) string {
	const limit = 64
	if len(s) > limit {
		n := limit
		for !utf8.RuneStart(s[n]) {
			n--
		}
		s = s[:n] + "..."
	}
	if strings.IndexFunc(s, func(r rune) bool { return r < ' ' || r == 0x7f }) >= 0 {
		return strconv.Quote(s)
	}
	return s
}

// syntaxProblem explains why the body is not JSON, with the place.
func syntaxProblem(err error) *Problem {
	var se *jsontext.SyntacticError
	if errors.Is(err, io.EOF) && !errors.As(err, &se) {
		return problem(CodeInvalidJSON, "The request body is empty.")
	}
	if !errors.As(err, &se) {
		return problem(CodeInvalidJSON, "").because(err)
	}
	field := pointerPath(se.JSONPointer)
	if errors.Is(err, jsontext.ErrDuplicateName) {
		return problem(CodeInvalidJSON, "The request body has a key twice in one object.", FieldError{field, "is there twice"})
	}
	detail := fmt.Sprintf("The request body is not valid JSON at or after byte %d: %s.", se.ByteOffset, shortenCause(se.Err))
	if field == "" {
		return problem(CodeInvalidJSON, detail)
	}
	return problem(CodeInvalidJSON, detail, FieldError{field, "is not valid JSON"})
}

// shortenCause names the syntax error in words that do not depend on the client's text.
func shortenCause(err error) string {
	switch {
	case errors.Is(err, io.ErrUnexpectedEOF):
		return "it ends too early"
	case err != nil && strings.Contains(err.Error(), "UTF-8"):
		return "invalid UTF-8"
	case err != nil && strings.Contains(err.Error(), "surrogate"):
		return "an escaped surrogate without its pair"
	case err != nil && strings.Contains(err.Error(), "depth"):
		return "it is nested too deeply"
	}
	return "unexpected character"
}

// maxFieldPath bounds the name of a field, which may be as deep as the client likes.
const maxFieldPath = 200

// pointerPath writes a JSON Pointer (RFC 6901) the way fields are named here: files[2].path.
func pointerPath(p jsontext.Pointer) string {
	path := ""
	for token := range p.Tokens() {
		if len(path) > maxFieldPath {
			return path + "..."
		}
		if _, err := strconv.Atoi(token); err == nil && path != "" {
			path += "[" + token + "]"
			continue
		}
		path = join(path, token)
	}
	return path
}
