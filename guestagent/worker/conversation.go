package worker

import (
	_ "embed"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"time"
)

// The bounds of the conversation, in bytes. A model's own limit is not known here: when it refuses a conversation as too
// long, the limit is halved.
const (
	maxContext = 384 << 10
	minContext = 8 << 10
	shortened  = 1 << 10 // what is kept of an old tool result
)

//go:embed system.md
var systemPrompt string

// message is one message of the chat-completions protocol.
type message struct {
	Role       string     `json:"role"`
	Content    *string    `json:"content"`
	ToolCalls  []toolCall `json:"tool_calls,omitempty"`
	ToolCallID string     `json:"tool_call_id,omitempty"`
}

type toolCall struct {
	ID       string       `json:"id"`
	Type     string       `json:"type"`
	Function toolFunction `json:"function"`
}

type toolFunction struct {
	Name      string `json:"name"`
	Arguments string `json:"arguments"`
}

// conversation is what the model is sent.
type conversation struct {
	tools    json.RawMessage // nil: none
	messages []message
	size     int
	ids      map[string]bool // of tool calls, so that no two are the same
}

// newConversation begins with the system prompt and the task.
func newConversation(c Config, p *permits, tools json.RawMessage) *conversation {
	t := &conversation{ids: map[string]bool{}, tools: tools}
	t.add(message{Role: "system", Content: ptr(permissions(c, p))})
	t.add(message{Role: "user", Content: &c.Prompt})
	return t
}

// permissions is the system prompt for what the run allows.
func permissions(c Config, p *permits) string {
	state := func(on bool) string {
		if on {
			return "on"
		}
		return "off"
	}
	connections, list := "none", ""
	if len(c.Connections) > 0 {
		connections = strings.Join(c.Connections, ", ")
	}
	for _, k := range p.connections {
		list += "\n  - " + k.line()
	}
	search, door, limit := "", "off", ""
	if p.search {
		search = " and `web_search` finds them"
	}
	if p.door {
		door = "on, as an OpenAI-compatible API without a key at http://broker.local/v1, paid from this task's money"
	}
	if !c.Deadline.IsZero() {
		limit = ", of " + strconv.Itoa(int(time.Until(c.Deadline).Seconds())) + " seconds in all"
	}
	return strings.NewReplacer(
		"{{shell}}", state(p.shell), "{{files}}", state(p.files), "{{web}}", state(p.web), "{{search}}", search,
		"{{connections}}", connections, "{{connection_list}}", list, "{{door}}", door,
		"{{steps}}", strconv.Itoa(c.MaxSteps), "{{time}}", limit,
	).Replace(systemPrompt)
}

func ptr(s string) *string { return &s }

func (m *message) size() int {
	n := 64 + len(m.ToolCallID)
	if m.Content != nil {
		n += len(*m.Content)
	}
	for _, c := range m.ToolCalls {
		n += 64 + len(c.ID) + len(c.Function.Name) + len(c.Function.Arguments)
	}
	return n
}

func (t *conversation) add(m message) {
	t.messages = append(t.messages, m)
	t.size += m.size()
}

func (t *conversation) addUser(text string) { t.add(message{Role: "user", Content: &text}) }

// addAssistant records the model's answer. Tool calls get ids where they have none of their own, and arguments that are no
// JSON are left out: providers refuse to read them back.
func (t *conversation) addAssistant(a *answer) {
	m := message{Role: "assistant"}
	if a.text != "" {
		m.Content = &a.text
	}
	for i := range a.calls {
		c := &a.calls[i]
		for n := len(t.ids) + 1; c.id == "" || t.ids[c.id]; n++ {
			c.id = "call_" + strconv.Itoa(n)
		}
		t.ids[c.id] = true
		arguments := c.arguments
		if !isObject(arguments) {
			arguments = "{}"
		}
		name := c.name
		if !isName(name) {
			name = "unknown"
		}
		m.ToolCalls = append(m.ToolCalls, toolCall{ID: c.id, Type: "function", Function: toolFunction{Name: name, Arguments: arguments}})
	}
	t.add(m)
}

func isObject(s string) bool {
	var v map[string]json.RawMessage
	return json.Unmarshal([]byte(s), &v) == nil && v != nil
}

// isName tells whether s has the form of a function's name in the protocol.
func isName(s string) bool {
	for _, r := range s {
		if (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && r != '_' && r != '-' {
			return false
		}
	}
	return s != "" && len(s) <= 64
}

func (t *conversation) addResult(id, text string) {
	t.add(message{Role: "tool", ToolCallID: id, Content: &text})
}

// shorten brings the conversation below limit: tool results first, the oldest first, to a part of them and then to nothing;
// then whole rounds of calls and results, again the oldest first. The prompt and the latest round stay.
func (t *conversation) shorten(limit int) {
	for _, keep := range []int{shortened, 0} {
		latest := t.latestRound()
		for i := range t.messages {
			if t.size <= limit {
				return
			}
			if m := &t.messages[i]; m.Role == "tool" && (i < latest || keep > 0) && len(*m.Content) > keep+128 {
				t.replace(i, bound(*m.Content, keep+128))
			}
		}
	}
	for t.size > limit && t.dropRound() {
	}
}

func (t *conversation) replace(i int, text string) {
	m := &t.messages[i]
	t.size += len(text) - len(*m.Content)
	m.Content = &text
}

// latestRound is the index of the last message of the model.
func (t *conversation) latestRound() int {
	for i := len(t.messages) - 1; i >= 0; i-- {
		if t.messages[i].Role == "assistant" {
			return i
		}
	}
	return len(t.messages)
}

// dropRound removes the oldest message of the model with the results that belong to it, unless it is the latest.
func (t *conversation) dropRound() bool {
	latest := t.latestRound()
	for from := range t.messages {
		if t.messages[from].Role != "assistant" {
			continue
		}
		if from >= latest {
			return false
		}
		to := from + 1
		for to < len(t.messages) && t.messages[to].Role == "tool" {
			to++
		}
		for _, m := range t.messages[from:to] {
			t.size -= m.size()
		}
		note := message{Role: "user", Content: ptr("[Earlier tool calls and their results were left out here.]")}
		if prior := t.messages[from-1]; prior.Role == "user" && *prior.Content == *note.Content {
			t.messages = append(t.messages[:from], t.messages[to:]...)
			return true
		}
		t.size += note.size()
		t.messages = append(append(t.messages[:from:from], note), t.messages[to:]...)
		return true
	}
	return false
}

// request is the conversation as the body of a chat-completions request.
func (t *conversation) request(model string, last bool) chatRequest {
	r := chatRequest{Model: model, Messages: t.messages, Stream: true, StreamOptions: map[string]bool{"include_usage": true}, Tools: t.tools}
	if last && t.tools != nil {
		r.ToolChoice = "none"
	}
	return r
}

type chatRequest struct {
	Model         string          `json:"model"`
	Messages      []message       `json:"messages"`
	Stream        bool            `json:"stream"`
	StreamOptions map[string]bool `json:"stream_options"`
	Tools         json.RawMessage `json:"tools,omitempty"`
	ToolChoice    string          `json:"tool_choice,omitempty"`
}

// bound cuts text to at most limit bytes, with a mark in the middle, never inside a character.
func bound(text string, limit int) string {
	if len(text) <= limit {
		return text
	}
	const room = 48 // for the mark
	half := max(limit-room, 0) / 2
	head := strings.ToValidUTF8(text[:half], "")
	tail := strings.ToValidUTF8(text[len(text)-half:], "")
	return fmt.Sprintf("%s\n[... %d bytes left out ...]\n%s", head, len(text)-len(head)-len(tail), tail)
}
