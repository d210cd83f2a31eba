package e2e

import (
	"bytes"
	"encoding/base64"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ephemeral-run/ephemeral/broker/openaitest"
	"github.com/ephemeral-run/ephemeral/client"
	"github.com/ephemeral-run/ephemeral/run"
)

// marker is an API key that must be found nowhere.
const marker = "sk-marker-7f3d9b52c1e84a06"

// TestModelThroughTheBroker runs a prompt against a local server that speaks the chat-completions protocol.
func TestModelThroughTheBroker(t *testing.T) {
	var inside []string // where the key was found while the machine lived
	var s *server
	provider := openaitest.NewFunc(t, marker, func(n int, r *openaitest.Request) openaitest.Answer {
		usage := &openaitest.Usage{Prompt: 100, Completion: 20}
		if n == 0 {
			return openaitest.Answer{ToolCalls: []openaitest.ToolCall{
				openaitest.Shell("a", "id -un; env; cat /proc/self/environ"), openaitest.Shell("b", "echo two >&2; exit 2")}, Usage: usage}
		}
		inside = append(inside, s.find(t, marker)...)
		last := r.Messages[len(r.Messages)-1]
		return openaitest.Answer{Text: "The second said: " + last.Text(), Usage: usage}
	})
	s = startOwn(t, "EPHEMERAL_OPENAI_BASE_URL="+provider.BaseURL, "EPHEMERAL_OPENAI_API_KEY="+marker)
	n := s.tenant(t, 1_000_000)
	r := n.finish(t, client.Request{Prompt: "Run two commands.", Model: "openai/gpt-5-nano"})
	if r.State != run.Succeeded || r.Result == nil || !strings.Contains(r.Result.Output, "two") {
		t.Fatalf("ended %s, error %+v, result %+v\n%s", r.State, r.Error, r.Result, s.cmd.Stderr)
	}
	requests := provider.Requests()
	if len(requests) != 2 || !requests[0].Stream || !requests[0].StreamOptions.IncludeUsage || requests[0].Model != "gpt-5-nano" {
		t.Errorf("the provider got %d requests, the first %+v", len(requests), requests[0])
	}
	if r.Usage.ModelCalls != 2 || r.Usage.InputTokens != 200 || r.Usage.OutputTokens != 40 || r.Usage.ShellCommands != 2 || r.Money.Model <= 0 {
		t.Errorf("usage %+v, money %+v", r.Usage, r.Money)
	}
	checkMoney(t, r, r.Money.Reserved)
	checkRecord(t, r)
	events := n.events(t, r.ID)
	for _, e := range events {
		if d, ok := e.Data.(run.ShellData); ok && d.Command == "echo two >&2; exit 2" && (d.ExitCode != 2 || d.Output != "two\n") {
			t.Errorf("second command: %+v", d)
		}
	}
	if count(events, run.EventModel) != 2 || count(events, run.EventShell) != 2 {
		t.Errorf("events %+v", events)
	}
	if found := append(inside, s.find(t, marker)...); len(found) > 0 {
		t.Errorf("the provider's key was found in %v", found)
	}
	if _, err := n.Run(t.Context(), r.ID); err != nil {
		t.Fatal(err)
	}
}

// find looks for a secret, as it is and in base64, in every file of the server's data directory (store, machines'
// directories, templates), in its log, and in the memory of every process of its machines and of its Redis.
func (s *server) find(t *testing.T, secret string) (found []string) {
	t.Helper()
	forms := [][]byte{[]byte(secret), []byte(base64.StdEncoding.EncodeToString([]byte(secret)))[:20]}
	has := func(b []byte) bool {
		for _, f := range forms {
			if bytes.Contains(b, f) {
				return true
			}
		}
		return false
	}
	if has([]byte(s.cmd.Stderr.(*locked).String())) {
		found = append(found, "log")
	}
	err := filepath.WalkDir(s.data, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return nil // it went meanwhile
		}
		if contains(path, 0, -1, has) {
			found = append(found, path)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	dirs, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		t.Fatal(err)
	}
	searched := 0
	for _, dir := range dirs {
		cmdline, _ := os.ReadFile(filepath.Join(dir, "cmdline"))
		if !bytes.Contains(cmdline, []byte(s.data)) || bytes.Contains(cmdline, []byte("e2e.test")) {
			continue
		}
		searched++
		if environ, _ := os.ReadFile(filepath.Join(dir, "environ")); has(environ) {
			found = append(found, dir+"/environ")
		}
		if memoryHas(t, dir, has) {
			found = append(found, dir+"/mem")
		}
	}
	if searched == 0 {
		t.Error("no process of a machine was searched")
	}
	return found
}

// memoryHas searches the writable memory of a process.
func memoryHas(t *testing.T, dir string, has func([]byte) bool) bool {
	t.Helper()
	maps, err := os.ReadFile(filepath.Join(dir, "maps"))
	if err != nil {
		return false // it ended meanwhile
	}
	for line := range strings.Lines(string(maps)) {
		var from, to int64
		var mode string
		if n, _ := fmt.Sscanf(line, "%x-%x %s", &from, &to, &mode); n != 3 || !strings.HasPrefix(mode, "rw") {
			continue
		}
		if contains(filepath.Join(dir, "mem"), from, to, has) {
			return true
		}
	}
	return false
}

// contains searches a file between two offsets, to its end if to is negative, in overlapping pieces.
func contains(path string, from, to int64, has func([]byte) bool) bool {
	f, err := os.Open(path)
	if err != nil {
		return false
	}
	defer f.Close()
	const piece, overlap = 4 << 20, 64
	buf := make([]byte, piece)
	for at := from; to < 0 || at < to; at += piece - overlap {
		want := int64(piece)
		if to >= 0 {
			want = min(want, to-at)
		}
		n, _ := f.ReadAt(buf[:want], at)
		if has(buf[:n]) {
			return true
		}
		if n < piece {
			return false
		}
	}
	return false
}
