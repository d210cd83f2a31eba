package sse

import (
	"bytes"
	"errors"
	"io"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/google/go-cmp/cmp"
)

func all(r io.Reader, limit int) (data []string, raw string, err error) {
	events := NewReader(r, limit)
	for {
		e, err := events.Next()
		if err != nil {
			return data, raw, err
		}
		data = append(data, string(e.Data))
		raw += string(e.Raw)
	}
}

func TestReader(t *testing.T) {
	for _, c := range []struct {
		name, in string
		data     []string
		err      error
	}{
		{"empty", "", nil, io.EOF},
		{"one", "data: a\n\n", []string{"a"}, io.EOF},
		{"no space", "data:a\n\n", []string{"a"}, io.EOF},
		{"one space only", "data:  a\n\n", []string{" a"}, io.EOF},
		{"CRLF", "data: a\r\n\r\ndata: b\r\n\r\n", []string{"a", "b"}, io.EOF},
		{"lines", "data: a\ndata: b\n\n", []string{"a\nb"}, io.EOF},
		{"empty data", "data\n\ndata:\n\n", []string{"", ""}, io.EOF},
		{"byte order mark", "\xef\xbb\xbfdata: a\n\n", []string{"a"}, io.EOF},
		{"comments, names, ids", ": x\n\nevent: e\nid: 1\nretry: 5\nfoo\n\n: y\ndata: a\n\n", []string{"a"}, io.EOF},
		{"other field with the same start", "database: a\n\n", nil, io.EOF},
		{"cut in the end", "data: a\n\ndata: b\n", []string{"a"}, io.ErrUnexpectedEOF},
		{"cut in a line", "data: a\n\ndata", []string{"a"}, io.ErrUnexpectedEOF},
		{"colon in data", "data: a: b\n\n", []string{"a: b"}, io.EOF},
		{"too long a line", "data: " + strings.Repeat("x", 100) + "\n\n", nil, ErrTooLong},
		{"too many lines", strings.Repeat("data: x\n", 20) + "\n", nil, ErrTooLong},
		{"too many comments", strings.Repeat(": x\n", 40) + "\n", nil, ErrTooLong},
		{"endless line", strings.Repeat("x", 100), nil, ErrTooLong},
		{"many comments apart", strings.Repeat(": x\n\n", 40) + "data: a\n\n", []string{"a"}, io.EOF},
	} {
		t.Run(c.name, func(t *testing.T) {
			for _, r := range []io.Reader{strings.NewReader(c.in), iotest.OneByteReader(strings.NewReader(c.in))} {
				data, _, err := all(r, 64)
				if !errors.Is(err, c.err) {
					t.Errorf("error %v, want %v", err, c.err)
				}
				if d := cmp.Diff(c.data, data); d != "" {
					t.Error(d)
				}
			}
		})
	}
}

func FuzzReader(f *testing.F) {
	f.Add([]byte("data: a\n\ndata: b\ndata: c\r\n\r\n: x\n\n"))
	f.Add([]byte("\xef\xbb\xbfdata\n\n"))
	f.Add([]byte("data: [DONE]\n\n"))
	f.Fuzz(func(t *testing.T, in []byte) {
		const limit = 128
		data, raw, err := all(bytes.NewReader(in), limit)
		if err == nil {
			t.Fatal("the stream never ended")
		}
		// Whatever was read reads the same again: nothing but data lines is passed on.
		again, raw2, err2 := all(strings.NewReader(raw), limit)
		if err2 != io.EOF || raw2 != raw || !cmp.Equal(data, again) {
			t.Fatalf("%q reads as %q, then as %q (%v)", in, data, again, err2)
		}
		slow, _, err3 := all(iotest.OneByteReader(bytes.NewReader(in)), limit)
		if !cmp.Equal(data, slow) || !errors.Is(err3, err) {
			t.Fatalf("byte by byte %q reads as %q (%v), at once as %q (%v)", in, slow, err3, data, err)
		}
		for _, d := range data {
			if len(d) > limit {
				t.Fatalf("an event of %d bytes", len(d))
			}
		}
	})
}
