package gateway

import (
	"encoding/base64"
	"fmt"
	"regexp"
	"strings"
	"unicode"

	"github.com/ephemeral-run/ephemeral/run"
)

// Limits of the files of one request.
const (
	maxFiles     = 100
	maxFileBytes = 8 << 20 // all together, decoded
	maxPath      = 512     // bytes
	maxPathPart  = 255     // bytes, NAME_MAX of Linux
	maxPathDepth = 32
)

var fileMode = regexp.MustCompile(`^0[0-7]{3}$`)

// files checks every file's path, encoding and content, and that the paths fit together.
func (v *violations) files(files []run.File) {
	total := 0
	tree := pathTree{files: map[string]bool{}, dirs: map[string]bool{}}
	for i, f := range files {
		field := fmt.Sprintf("files[%d]", i)
		if why := badPath(f.Path); why != "" {
			v.invalid(field+".path", "%s", why)
		} else if why := tree.add(f.Path); why != "" {
			v.invalid(field+".path", "%s", why)
		}
		if f.Mode != "" && !fileMode.MatchString(f.Mode) {
			v.invalid(field+".mode", `must be four octal digits such as "0755", the first of them 0`)
		}
		if f.Upload != "" {
			if _, err := run.ParseUploadID(string(f.Upload)); err != nil {
				v.add(CodeUnknownUpload, field+".upload", uploadGone)
			}
			continue
		}
		n, why := decodedSize(f)
		if why != "" {
			v.invalid(field+why, "%s", decodeDetail[why])
		}
		total += n
	}
	if total > maxFileBytes {
		v.invalid("files", "have %d bytes together, at most %d are allowed", total, maxFileBytes)
	}
}

// decodeDetail says what is wrong with a file by the member at fault.
var decodeDetail = map[string]string{
	".encoding": `must be "base64", or left out for text`,
	".content":  "is not valid base64 (RFC 4648, with padding)",
}

// decodedSize returns how many bytes the file has in the machine, or the member at fault.
func decodedSize(f run.File) (n int, fault string) {
	switch f.Encoding {
	case "":
		return len(f.Content), ""
	case "base64":
		n, ok := base64Size(f.Content)
		if !ok {
			return 0, ".content"
		}
		return n, ""
	}
	return 0, ".encoding"
}

// base64Piece is how many bytes of base64 are decoded at once; four give three.
const base64Piece = 16 << 10

// base64Size returns how many bytes the base64 stands for. ok is false where it is not strict (RFC 4648, with padding and
// nothing else). The bytes themselves are not kept.
func base64Size(s string) (size int, ok bool) {
	if len(s)%4 != 0 || strings.ContainsAny(s, "\r\n") {
		return 0, false
	}
	var in [base64Piece]byte
	var out [base64Piece / 4 * 3]byte
	for len(s) > 0 {
		n := copy(in[:], s)
		m, err := base64.StdEncoding.Strict().Decode(out[:], in[:n])
		if err != nil || n < len(s) && in[n-1] == '=' {
			return 0, false
		}
		size, s = size+m, s[n:]
	}
	return size, true
}

// badPath says why the path cannot be used; "" when it can. A path is relative, with slashes, and in its only form.
func badPath(p string) string {
	switch {
	case p == "":
		return "is empty"
	case len(p) > maxPath:
		return fmt.Sprintf("has %d bytes, at most %d are allowed", len(p), maxPath)
	case p[0] == '/':
		return "must be relative"
	case strings.ContainsRune(p, '\\'):
		return "contains a backslash"
	case hasControl(p):
		return "contains a control character"
	}
	parts := strings.Split(p, "/")
	if len(parts) > maxPathDepth {
		return fmt.Sprintf("has %d parts, at most %d are allowed", len(parts), maxPathDepth)
	}
	for _, part := range parts {
		switch {
		case part == "":
			return "has an empty part"
		case part == "." || part == "..":
			return `must not contain "." or ".." as a part`
		case len(part) > maxPathPart:
			return fmt.Sprintf("has a part of %d bytes, at most %d are allowed", len(part), maxPathPart)
		}
	}
	return ""
}

func hasControl(s string) bool { return strings.IndexFunc(s, unicode.IsControl) >= 0 }

// pathTree knows the paths so far, as files and as the directories that they need.
type pathTree struct{ files, dirs map[string]bool }

// add takes the path in, or says what it collides with.
func (t pathTree) add(p string) string {
	if t.files[p] {
		return "is there twice"
	}
	if t.dirs[p] {
		return "is a directory of another file's path"
	}
	for i := range len(p) {
		if p[i] != '/' {
			continue
		}
		if t.files[p[:i]] {
			return "has another file as a directory"
		}
		t.dirs[p[:i]] = true
	}
	t.files[p] = true
	return ""
}
