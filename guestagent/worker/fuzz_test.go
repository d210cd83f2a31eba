package worker

import (
	"context"
	"encoding/json"
	"net/http"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/ephemeral-run/ephemeral/broker/openaitest"
)

// FuzzToolCall: whatever a model calls a tool with, the result is bounded text, the conversation is one that a provider can
// read back, and the work goes on.
func FuzzToolCall(f *testing.F) {
	for name := range doers {
		f.Add(name, `{"command": "ls", "path": "a", "content": "b", "url": "u", "query": "q", "connection": "billing", "sql": "s"}`)
		f.Add(name, `{"timeout_seconds": 1e99, "offset": -0.5, "limit": 1e400, "count": "x", "params": [{}], "headers": {"": ""}}`)
		f.Add(name, `null`)
	}
	f.Add("", "")
	b := &brokerDouble{provider: openaitest.New(f, "", openaitest.Answer{Text: "ok"}), routes: map[string]http.HandlerFunc{
		"GET /connections": brokerSays(http.StatusOK, "", someConnections),
		"GET /web/search":  brokerSays(http.StatusMethodNotAllowed, "method_not_allowed", "POST"),
	}}
	c := b.start(f, &machine{})
	c.Shell, c.Web, c.Connections, c.MaxSteps = true, true, []string{"billing", "warehouse"}, 3
	w := newWorker(c, func(ctx context.Context, _ time.Duration) error { return ctx.Err() })
	if got := w.run(f.Context()); !got.OK || len(w.tools) != len(doers) {
		f.Fatalf("%+v, %d tools", got, len(w.tools))
	}
	f.Fuzz(func(t *testing.T, name, arguments string) {
		w.talk, w.done = newConversation(c, &w.permits, nil), nil
		a := &answer{calls: []call{{"", name, arguments}}}
		w.talk.addAssistant(a)
		result := w.use(t.Context(), a.calls[0])
		if !utf8.ValidString(result) || strings.ContainsRune(result, 0) || len(result) > maxResult+8<<10 || result == "" {
			t.Fatalf("result of %d bytes: %.100q", len(result), result)
		}
		sent := w.talk.messages[2].ToolCalls[0]
		if !isName(sent.Function.Name) || !json.Valid([]byte(sent.Function.Arguments)) || sent.ID == "" {
			t.Fatalf("sent back %+v", sent)
		}
		if got := w.stopped(CodeModel, result); !utf8.ValidString(got.Output) {
			t.Fatalf("%q", got.Output)
		}
	})
}
