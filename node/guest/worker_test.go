package guest

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ephemeral-run/ephemeral/guestagent/proto"
)

// scriptedModel is a broker whose model asks for one command after the other and then says what it saw last.
type scriptedModel struct {
	commands []string

	mu   sync.Mutex
	seen []string // the results the worker sent back
}

func (m *scriptedModel) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var request struct {
		Messages []struct {
			Role    string `json:"role"`
			Content any    `json:"content"`
		} `json:"messages"`
	}
	if err := json.NewDecoder(r.Body).Decode(&request); err != nil || r.URL.Path != "/v1/chat/completions" {
		http.Error(w, "bad request", http.StatusBadRequest)
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.seen = m.seen[:0]
	for _, message := range request.Messages {
		if message.Role == "tool" {
			m.seen = append(m.seen, fmt.Sprint(message.Content))
		}
	}
	w.Header().Set("Content-Type", "text/event-stream")
	delta := map[string]any{"content": "all done"}
	finish := "stop"
	if step := len(m.seen); step < len(m.commands) {
		arguments, _ := json.Marshal(map[string]any{"command": m.commands[step]})
		delta = map[string]any{"tool_calls": []any{map[string]any{
			"index": 0, "id": fmt.Sprint("call-", step), "type": "function",
			"function": map[string]any{"name": "shell", "arguments": string(arguments)},
		}}}
		finish = "tool_calls"
	}
	event, _ := json.Marshal(map[string]any{"choices": []any{map[string]any{"index": 0, "delta": delta, "finish_reason": finish}}})
	_, _ = fmt.Fprintf(w, "data: %s\n\ndata: [DONE]\n\n", event)
}

// serveBroker lets the machine reach a model.
func (m *machine) serveBroker(t *testing.T, handler http.Handler) {
	t.Helper()
	listener, err := m.host.Listen(proto.BrokerPort)
	if err != nil {
		t.Fatal(err)
	}
	broker := &http.Server{Handler: handler}
	ended := make(chan struct{})
	go func() { defer close(ended); _ = broker.Serve(listener) }()
	t.Cleanup(func() { _ = broker.Close(); <-ended })
}

func TestWorkerRunsCommands(t *testing.T) {
	m, scratch := prepared(t)
	steps := []struct {
		command, output string
		code            int
		outcome         string
		truncated       bool
	}{
		{command: "pwd", output: scratch + "\n", outcome: "exited"},
		{command: "mkdir -p 'a b' && cd 'a b' && echo $#", output: "0\n", outcome: "exited"},
		{command: "pwd; exit 3", output: scratch + "/a b\n", code: 3, outcome: "exited"},
		{command: "pwd; echo err >&2; echo out; X=1", output: scratch + "/a b\nerr\nout\n", outcome: "exited"},
		{command: "echo \"${X-unset}\"; cd /; kill -9 $$", output: "unset\n", code: 137, outcome: "signalled"},
		{command: "pwd; if", outcome: "exited", code: 2},
		{command: "pwd; cd ..; rmdir 'a b'", output: scratch + "/a b\n", outcome: "exited"},
		{command: "mkdir gone; cd gone; rmdir ../gone", outcome: "exited"},
		{command: "pwd", output: scratch + "\n", outcome: "exited"},
		{command: "for i in $(seq 30000); do printf €; done", output: strings.Repeat("€", shellKept), outcome: "exited", truncated: true},
		{command: "printf 'a\\377b'; echo /etc >&3; sleep 1000 & true", output: "a\xffb", outcome: "exited"},
		{command: "no-such-command", code: 127, outcome: "exited"},
	}
	model := &scriptedModel{}
	for _, s := range steps {
		model.commands = append(model.commands, s.command)
	}
	m.serveBroker(t, model)
	var events []Shell
	finished, err := m.StartWorker(ctx(t), Worker{Prompt: "go", Model: "test/model", Shell: true}, func(s Shell) error {
		events = append(events, s)
		return nil
	})
	if err != nil || finished != (Finished{OK: true, Output: "all done"}) {
		t.Fatalf("got %+v, %v", finished, err)
	}
	if len(events) != len(steps) || len(model.seen) != len(steps) {
		t.Fatalf("%d events, %d results", len(events), len(model.seen))
	}
	for i, want := range steps {
		got := events[i]
		if got.Command != want.command || got.Exit.Outcome != want.outcome || got.Exit.Code != want.code || got.Exit.StdoutTruncated != want.truncated {
			t.Errorf("%q: %+v", want.command, got.Exit)
		}
		if want.output != "" && string(got.Output) != want.output {
			t.Errorf("%q: output %.200q, want %.200q", want.command, got.Output, want.output)
		}
		if got.Duration <= 0 || got.OutputBytes < int64(len(got.Output)) {
			t.Errorf("%q: %+v", want.command, got)
		}
	}
	if _, err := m.StartWorker(ctx(t), Worker{Prompt: "again", Model: "test/model"}, nil); !errors.As(err, new(*RefusedError)) {
		t.Errorf("second worker: %v", err)
	}
}

// shellKept is how many characters of three bytes fit the 64 KiB that are kept of a command's output.
const shellKept = 64 << 10 / 3

func TestWorkerEnds(t *testing.T) {
	t.Run("kill", func(t *testing.T) {
		m, _ := prepared(t)
		m.serveBroker(t, &scriptedModel{commands: []string{"sleep 1000"}})
		killed := make(chan struct{})
		time.AfterFunc(500*time.Millisecond, func() {
			defer close(killed)
			if err := m.Kill(ctx(t)); err != nil {
				t.Error(err)
			}
		})
		var outcome string
		finished, err := m.StartWorker(ctx(t), Worker{Prompt: "p", Model: "m", Shell: true}, func(s Shell) error { outcome = s.Exit.Outcome; return nil })
		<-killed
		if err != nil || finished.OK || finished.ErrorCode != "worker_error" || outcome != "killed" {
			t.Errorf("got %+v, %v, command %s", finished, err, outcome)
		}
	})
	t.Run("caller gone", func(t *testing.T) {
		m, scratch := prepared(t)
		m.serveBroker(t, &scriptedModel{commands: []string{"sleep 1; touch late"}})
		own := errors.New("client went away")
		if _, err := m.StartWorker(ctxWith(t, 300*time.Millisecond, own), Worker{Prompt: "p", Model: "m", Shell: true}, nil); !errors.Is(err, own) {
			t.Errorf("got %v", err)
		}
		time.Sleep(1500 * time.Millisecond)
		if _, err := os.Stat(filepath.Join(scratch, "late")); err == nil {
			t.Error("the command went on")
		}
	})
	t.Run("no broker", func(t *testing.T) {
		m, _ := prepared(t)
		finished, err := m.StartWorker(ctx(t), Worker{Prompt: "p", Model: "m", Shell: true}, nil)
		if err != nil || finished.OK || finished.ErrorCode != "model_error" {
			t.Errorf("got %+v, %v", finished, err)
		}
	})
	t.Run("bad requests", func(t *testing.T) {
		m, _ := prepared(t)
		for _, w := range []Worker{{Model: "m"}, {Prompt: "p"}, {Prompt: "p", Model: "m", MaxSteps: -1}, {Prompt: "p", Model: strings.Repeat("m", 1000)}} {
			if _, err := m.StartWorker(ctx(t), w, nil); !errors.As(err, new(*RefusedError)) {
				t.Errorf("%.50v: %v", w, err)
			}
		}
	})
}
