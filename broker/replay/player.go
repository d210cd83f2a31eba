package replay

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"
)

// maxRequest bounds the request bodies that a player reads.
const maxRequest = 8 << 20

// Player answers chat-completions requests from conversations, like an upstream that is reached over HTTP. It keeps
// nothing between requests and is safe for concurrent use.
type Player struct {
	conversations map[string]*Conversation
}

// NewPlayer plays the given conversations, by name.
func NewPlayer(conversations map[string]*Conversation) *Player {
	return &Player{conversations: conversations}
}

// Has tells whether there is a conversation of this name.
func (p *Player) Has(name string) bool { return p.conversations[name] != nil }

// request is the part of a chat-completions request that a player looks at.
type request struct {
	Model         string `json:"model"`
	Stream        bool   `json:"stream"`
	StreamOptions struct {
		IncludeUsage bool `json:"include_usage"`
	} `json:"stream_options"`
	Messages []struct {
		Role       string          `json:"role"`
		Content    json.RawMessage `json:"content"`
		ToolCallID string          `json:"tool_call_id"`
	} `json:"messages"`
}

// RoundTrip answers one request, so that a player can stand where an HTTP transport does.
func (p *Player) RoundTrip(r *http.Request) (*http.Response, error) {
	var body io.Reader = http.NoBody
	if r.Body != nil {
		defer r.Body.Close()
		body = r.Body
	}
	data, err := io.ReadAll(io.LimitReader(body, maxRequest+1))
	if err != nil {
		return nil, fmt.Errorf("replay: read request: %w", err)
	}
	if err := r.Context().Err(); err != nil {
		return nil, err
	}
	status, kind, out := p.answer(r, data)
	return &http.Response{
		Status:        strconv.Itoa(status) + " " + http.StatusText(status),
		StatusCode:    status,
		Proto:         "HTTP/1.1",
		ProtoMajor:    1,
		ProtoMinor:    1,
		Header:        http.Header{"Content-Type": {kind}},
		Body:          io.NopCloser(bytes.NewReader(out)),
		ContentLength: int64(len(out)),
		Request:       r,
	}, nil
}

func (p *Player) answer(r *http.Request, data []byte) (status int, kind string, body []byte) {
	const jsonKind = "application/json"
	if r.Method != http.MethodPost || !strings.HasSuffix(r.URL.Path, "/chat/completions") {
		return http.StatusNotFound, jsonKind, problem("not_found", "only POST /chat/completions is answered")
	}
	if len(data) > maxRequest {
		return http.StatusRequestEntityTooLarge, jsonKind, problem("request_too_large", fmt.Sprintf("at most %d bytes are read", maxRequest))
	}
	var req request
	if err := json.Unmarshal(data, &req); err != nil {
		return http.StatusBadRequest, jsonKind, problem("invalid_json", "the body is no chat-completions request: "+err.Error())
	}
	c := p.conversations[req.Model]
	if c == nil {
		return http.StatusNotFound, jsonKind, problem("model_not_found", fmt.Sprintf("there is no conversation %.80q", req.Model))
	}
	a, err := c.play(&req)
	if err != nil {
		return http.StatusBadRequest, jsonKind, problem("replay_error", err.Error())
	}
	if req.Stream {
		return http.StatusOK, "text/event-stream", a.stream(req.StreamOptions.IncludeUsage)
	}
	return http.StatusOK, jsonKind, a.whole()
}

func problem(code, message string) []byte {
	out, err := encode(map[string]any{"error": map[string]any{"code": code, "message": message, "type": "invalid_request_error"}})
	if err != nil {
		return nil // strings always encode
	}
	return []byte(out)
}

// answer is one step, filled in.
type answer struct {
	id    string
	model string
	text  string
	calls []toolCall
	usage usage
	at    int64
}

// play chooses the step for the request and fills in its text.
func (c *Conversation) play(req *request) (*answer, error) {
	n, found := 0, results{}
	for _, m := range req.Messages {
		switch m.Role {
		case "assistant":
			n++
		case "tool":
			text, err := contentText(m.Content)
			if err != nil {
				return nil, fmt.Errorf("result of tool call %.80q: %w", m.ToolCallID, err)
			}
			found[m.ToolCallID] = text
		}
	}
	if n >= len(c.steps) {
		return nil, fmt.Errorf("conversation %s has %d steps and the request asks for step %d", c.Name, len(c.steps), n+1)
	}
	s := c.steps[n]
	text, err := found.execute(s.text)
	if err != nil {
		return nil, fmt.Errorf("conversation %s, step %d: %w", c.Name, n+1, err)
	}
	return &answer{
		id: fmt.Sprintf("chatcmpl-%s-%d", c.Name, n+1), model: c.Name,
		text: text, calls: s.calls, usage: s.usage, at: time.Now().Unix(),
	}, nil
}

// contentText is the text of a message's content: a string, or a list of text parts.
func contentText(raw json.RawMessage) (string, error) {
	if len(raw) == 0 || string(raw) == "null" {
		return "", nil
	}
	var text string
	if json.Unmarshal(raw, &text) == nil {
		return text, nil
	}
	var parts []struct {
		Text string `json:"text"`
	}
	if err := json.Unmarshal(raw, &parts); err != nil {
		return "", fmt.Errorf("content is neither text nor a list of parts: %w", err)
	}
	var b strings.Builder
	for _, p := range parts {
		b.WriteString(p.Text)
	}
	return b.String(), nil
}

type object = map[string]any

func (a *answer) finish() string {
	if len(a.calls) > 0 {
		return "tool_calls"
	}
	return "stop"
}

func (a *answer) usageObject() object {
	return object{
		"prompt_tokens": a.usage.input, "completion_tokens": a.usage.output, "total_tokens": a.usage.input + a.usage.output,
		"prompt_tokens_details": object{"cached_tokens": a.usage.cached},
	}
}

// whole is the answer as one JSON document.
func (a *answer) whole() []byte {
	message := object{"role": "assistant", "content": nil}
	if a.text != "" {
		message["content"] = a.text
	}
	var calls []object
	for _, c := range a.calls {
		calls = append(calls, object{"id": c.id, "type": "function", "function": object{"name": c.name, "arguments": c.arguments}})
	}
	if calls != nil {
		message["tool_calls"] = calls
	}
	out, err := encode(object{
		"id": a.id, "object": "chat.completion", "created": a.at, "model": a.model,
		"choices": []object{{"index": 0, "message": message, "finish_reason": a.finish()}},
		"usage":   a.usageObject(),
	})
	if err != nil {
		return nil // maps of strings and numbers always encode
	}
	return []byte(out)
}

// stream is the answer as a stream of events: the role, the text and the tool calls in pieces, the reason of the end, and
// the usage when it was asked for.
func (a *answer) stream(withUsage bool) []byte {
	var b bytes.Buffer
	event := func(choices []object, use any) {
		chunk := object{"id": a.id, "object": "chat.completion.chunk", "created": a.at, "model": a.model, "choices": choices}
		if withUsage {
			chunk["usage"] = use
		}
		out, err := encode(chunk)
		if err != nil {
			return // maps of strings and numbers always encode
		}
		fmt.Fprintf(&b, "data: %s\n\n", out)
	}
	delta := func(d object, reason any) {
		event([]object{{"index": 0, "delta": d, "finish_reason": reason}}, nil)
	}
	role := object{"role": "assistant", "content": ""}
	if a.text == "" {
		role["content"] = nil // as in the answer in one piece
	}
	delta(role, nil)
	for _, piece := range pieces(a.text, 48) {
		delta(object{"content": piece}, nil)
	}
	for i, c := range a.calls {
		delta(object{"tool_calls": []object{{"index": i, "id": c.id, "type": "function", "function": object{"name": c.name, "arguments": ""}}}}, nil)
		for _, piece := range pieces(c.arguments, 48) {
			delta(object{"tool_calls": []object{{"index": i, "function": object{"arguments": piece}}}}, nil)
		}
	}
	delta(object{}, a.finish())
	if withUsage {
		event([]object{}, a.usageObject())
	}
	b.WriteString("data: [DONE]\n\n")
	return b.Bytes()
}

// pieces cuts s into parts of about n bytes, never inside a character.
func pieces(s string, n int) []string {
	var out []string
	for len(s) > n {
		end := n
		for end > 0 && !utf8.RuneStart(s[end]) {
			end--
		}
		if end == 0 {
			end = n
		}
		out, s = append(out, s[:end]), s[end:]
	}
	if s != "" {
		out = append(out, s)
	}
	return out
}
