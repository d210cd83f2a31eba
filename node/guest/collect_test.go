package guest

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/ephemeral-run/ephemeral/guestagent/proto"
)

// basket keeps what is collected.
type basket struct {
	files map[string]string
	path  string
}

func (b *basket) Begin(path string, mode uint32) error {
	if b.files == nil {
		b.files = map[string]string{}
	}
	b.path, b.files[path] = path, fmt.Sprintf("%o ", mode)
	return nil
}

func (b *basket) Write(p []byte) error {
	b.files[b.path] += string(p)
	return nil
}

func TestCollect(t *testing.T) {
	m, scratch := prepared(t)
	large := strings.Repeat("0123456789\x00", 100_000)
	want := map[string]string{"empty": "", "nul": "\x00", "a/b/große Datei €": large, "exact": strings.Repeat("x", 2*collectChunk)}
	for name, content := range want {
		path := filepath.Join(scratch, "out", name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(content), 0o644)); err != nil {
			t.Fatal(err)
		}
		want[name] = "644 " + content
	}
	if err := os.Symlink("/etc/passwd", filepath.Join(scratch, "out", "link")); err != nil {
		t.Fatal(err)
	}
	var got basket
	left, err := m.Collect(ctx(t), Limits{Files: 10, Bytes: 2 << 20, Path: 512}, &got)
	if d := cmp.Diff(want, got.files); err != nil || d != "" {
		t.Errorf("%v: %.200s", err, d)
	}
	if left != (Left{Skipped: 1}) {
		t.Errorf("%+v", left)
	}
}

func TestLyingCollect(t *testing.T) {
	limits := Limits{Files: 2, Bytes: 100, Path: 5}
	piece := func(path string, bytes int) *proto.CollectResponse {
		return &proto.CollectResponse{Path: path, Data: make([]byte, bytes)}
	}
	end := &proto.CollectResponse{End: &proto.CollectEnd{Truncated: true}}
	for name, pieces := range map[string][]*proto.CollectResponse{
		"no end":           {piece("a", 1)},
		"no file":          {piece("", 1), end},
		"nothing":          {piece("a", 1), piece("", 0), end},
		"too many files":   {piece("a", 1), piece("b", 1), piece("c", 1), end},
		"too many bytes":   {piece("a", 60), piece("b", 60), end},
		"long path":        {piece("abcdef", 1), end},
		"many messages":    {piece("a", 1), piece("", 1), piece("", 1), piece("", 1), piece("", 1), piece("", 1), end},
		"end with data":    {{Data: []byte("x"), End: &proto.CollectEnd{}}},
		"negative skipped": {{End: &proto.CollectEnd{Skipped: -1}}},
		"large piece":      {piece("a", collectChunk+1), end},
	} {
		t.Run(name, func(t *testing.T) {
			c := believe(t, &liar{collect: func(s proto.Agent_CollectServer) error {
				for _, p := range pieces {
					if err := s.Send(p); err != nil {
						return err
					}
				}
				return nil
			}})
			if _, err := c.Collect(ctx(t), limits, new(basket)); !errors.Is(err, ErrLost) {
				t.Errorf("got %v", err)
			}
		})
	}
	c := believe(t, &liar{collect: func(s proto.Agent_CollectServer) error {
		return errors.Join(s.Send(piece("a", 60)), s.Send(piece("b", 40)), s.Send(end))
	}})
	var got basket
	if left, err := c.Collect(ctx(t), limits, &got); err != nil || left != (Left{Truncated: true}) || len(got.files) != 2 {
		t.Errorf("%+v, %v, %v", left, err, got.files)
	}
}

func TestCollectSinkFails(t *testing.T) {
	m, scratch := prepared(t)
	if err := os.WriteFile(filepath.Join(scratch, "out", "a"), bytes.Repeat([]byte("x"), 1000), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := m.Collect(ctx(t), Limits{Files: 1, Bytes: 1000, Path: 10}, full{}); !errors.Is(err, errFull) {
		t.Errorf("got %v", err)
	}
}

var errFull = errors.New("full")

type full struct{}

func (full) Begin(string, uint32) error { return nil }
func (full) Write([]byte) error         { return errFull }
