package worker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"unicode/utf8"
)

// maxWrite bounds the text of one write_file call, in bytes.
const maxWrite = maxArguments

// FilePart is some of a file.
type FilePart struct {
	Data []byte
	Size int64 // of the whole file
}

func (w *worker) readFile(ctx context.Context, arguments []byte) string {
	var args struct {
		Path   string      `json:"path"`
		Offset json.Number `json:"offset"`
		Limit  json.Number `json:"limit"`
	}
	if err := parse(arguments, &args); err != nil {
		return failure(err)
	}
	if err := checkPath(args.Path); err != nil {
		return failure(err)
	}
	offset, err := count(args.Offset, 0, 1<<53)
	if err != nil {
		return failure(fmt.Errorf(`"offset" %w`, err))
	}
	limit, err := count(args.Limit, maxResult, 1<<53)
	if err != nil || limit == 0 {
		return failure(errors.New(`"limit" must be a number above zero`))
	}
	part, err := w.ReadFile(ctx, args.Path, offset, int(min(limit, maxResult)))
	if err != nil {
		w.record("read "+args.Path, "failed")
		return failure(err)
	}
	w.record("read "+args.Path, fmt.Sprintf("%d bytes", len(part.Data)))
	return present(part, offset)
}

// present is a part of a file as the model sees it. A character that the part's borders cut is left out and said to be.
func present(part FilePart, offset int64) string {
	data := part.Data
	if offset > 0 {
		for n := 0; n < utf8.UTFMax-1 && len(data) > 0 && !utf8.RuneStart(data[0]); n++ {
			data, offset = data[1:], offset+1
		}
	}
	if end := offset + int64(len(data)); end < part.Size {
		data = data[:whole(data)]
	}
	if len(data) == 0 {
		return fmt.Sprintf("nothing from byte %d of %d", offset, part.Size)
	}
	note := ""
	if !utf8.Valid(data) || strings.ContainsRune(string(data), 0) {
		note = " (not all of it is text)"
	}
	return fmt.Sprintf("bytes %d to %d of %d%s\n%s", offset, offset+int64(len(data))-1, part.Size, note, data)
}

// whole is the length of b without a character that is cut at its end.
func whole(b []byte) int {
	for i := len(b) - 1; i >= 0 && i >= len(b)-utf8.UTFMax+1; i-- {
		if utf8.RuneStart(b[i]) {
			if !utf8.FullRune(b[i:]) {
				return i
			}
			break
		}
	}
	return len(b)
}

func (w *worker) writeFile(ctx context.Context, arguments []byte) string {
	var args struct {
		Path    string  `json:"path"`
		Content *string `json:"content"`
		Append  bool    `json:"append"`
	}
	if err := parse(arguments, &args); err != nil {
		return failure(err)
	}
	if err := checkPath(args.Path); err != nil {
		return failure(err)
	}
	if args.Content == nil {
		return failure(errors.New(`the arguments have no "content"`))
	}
	if len(*args.Content) > maxWrite {
		return failure(fmt.Errorf("the content has %d bytes, at most %d can be written at once", len(*args.Content), maxWrite))
	}
	if err := w.WriteFile(ctx, args.Path, []byte(*args.Content), args.Append); err != nil {
		w.record("write "+args.Path, "failed")
		return failure(err)
	}
	done := fmt.Sprintf("%d bytes written", len(*args.Content))
	w.record("write "+args.Path, done)
	return done
}

func checkPath(path string) error {
	switch {
	case path == "":
		return errors.New(`the arguments have no "path"`)
	case strings.ContainsRune(path, 0):
		return errors.New("a path cannot hold NUL bytes")
	case len(path) > 4096:
		return errors.New("the path has more than 4096 bytes")
	}
	return nil
}

// count reads a whole number of 0 to most; absent is what it is when it is not there.
func count(n json.Number, absent, most int64) (int64, error) {
	if n == "" {
		return absent, nil
	}
	f, err := n.Float64()
	if err != nil || f < 0 || f != float64(int64(f)) {
		return 0, errors.New("must be a whole number that is not negative")
	}
	return int64(min(f, float64(most))), nil
}
