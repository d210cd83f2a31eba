// Package openaitest is a double of a model provider: a local server that speaks the chat-completions protocol, gives
// scripted answers, and misbehaves in the ways that providers do.
package openaitest

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"time"
	"unicode/utf8"
)

// Request is one request as the provider got it.
type Request struct {
	Header http.Header
	Body   []byte

	Model         string `json:"model"`
	Stream        bool   `json:"stream"`
	StreamOptions struct {
		IncludeUsage bool `json:"include_usage"`
	} `json:"stream_options"`
	MaxTokens           int64           `json:"max_tokens"`
	MaxCompletionTokens int64           `json:"max_completion_tokens"`
	Messages            []Message       `json:"messages"`
	Tools               json.RawMessage `json:"tools"`
}

// Message is one message of a request.
type Message struct {
	Role       string          `json:"role"`
	Content    json.RawMessage `json:"content"`
	ToolCallID string          `json:"tool_call_id"`
	ToolCalls  []struct {
		ID       string `json:"id"`
		Function struct {
			Name      string `json:"name"`
			Arguments string `json:"arguments"`
		} `json:"function"`
	} `json:"tool_calls"`
}

// Text is the content of the message when it is plain text.
func (m Message) Text() string {
	var s string
	if json.Unmarshal(m.Content, &s) != nil {
		return ""
	}
	return s
}

// Usage is what an answer is billed as.
type Usage struct {
	Prompt, Cached, Completion int64
}

// ToolCall is a tool call of an answer.
type ToolCall struct {
	ID, Name, Arguments string
}

// Shell is a call of the tool "shell" with a command.
func Shell(id, command string) ToolCall {
	args, err := json.Marshal(map[string]string{"command": command})
	if err != nil {
		panic(err) // a string always encodes
	}
	return ToolCall{ID: id, Name: "shell", Arguments: string(args)}
}

// Answer is one scripted answer. The zero value is an empty answer without usage.
type Answer struct {
	Text      string
	ToolCalls []ToolCall
	Finish    string // "": stop or tool_calls
	Usage     *Usage // nil: the answer has no usage
	Piece     int    // bytes of text or arguments a chunk; 0: 5

	Status     int    // other than 0 and 200: an error with ErrorCode and ErrorText
	ErrorCode  string // also with Status 200: an error in the middle of a stream
	ErrorText  string
	RetryAfter string

	Delay    time.Duration // before the answer begins
	Pause    time.Duration // between chunks
	CutAfter int           // >0: the connection is cut after this many bytes of the body
	Refuse   bool          // the connection is cut before the answer begins
	Endless  bool          // the stream repeats its text for ever
	Echo     bool          // the Authorization header is repeated in text and errors
	Raw      string        // the whole body of a 200 answer, as it is
	RawType  string        // Content-Type of Raw
}

// Server is the double. Its methods may be called while it serves.
type Server struct {
	// BaseURL is what a client of the provider is configured with.
	BaseURL string

	server *httptest.Server
	key    string
	script func(n int, r *Request) Answer

	mu       sync.Mutex
	requests []Request
	active   int
	most     int
}

// New starts a server that wants the given API key and gives the answers in turn, the last one again and again. It ends
// with the test.
func New(t testing.TB, key string, answers ...Answer) *Server {
	return NewFunc(t, key, func(n int, _ *Request) Answer {
		if len(answers) == 0 {
			return Answer{Status: http.StatusInternalServerError, ErrorText: "no answer is scripted"}
		}
		return answers[min(n, len(answers)-1)]
	})
}

// NewFunc starts a server whose answers are made by script, which gets the number of the request, from 0.
func NewFunc(t testing.TB, key string, script func(n int, r *Request) Answer) *Server {
	s := &Server{key: key, script: script}
	s.server = httptest.NewServer(s)
	s.BaseURL = s.server.URL + "/v1"
	t.Cleanup(s.Close)
	return s
}

// Close ends the server and cuts what it still sends.
func (s *Server) Close() {
	s.server.CloseClientConnections()
	s.server.Close()
}

// Requests returns what was asked so far, refused keys included.
func (s *Server) Requests() []Request {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]Request(nil), s.requests...)
}

// MostAtOnce is the greatest number of requests that were in flight together.
func (s *Server) MostAtOnce() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.most
}

// ServeHTTP answers one request.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(io.LimitReader(r.Body, 64<<20))
	if err != nil {
		return
	}
	req := Request{Header: r.Header.Clone(), Body: body}
	bad := json.Unmarshal(body, &req)
	s.mu.Lock()
	n := len(s.requests)
	s.requests = append(s.requests, req)
	s.active++
	s.most = max(s.most, s.active)
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		s.active--
		s.mu.Unlock()
	}()
	switch {
	case r.URL.Path != "/v1/chat/completions" || r.Method != http.MethodPost:
		fail(w, http.StatusNotFound, "not_found", "no such path")
	case s.key != "" && r.Header.Get("Authorization") != "Bearer "+s.key:
		fail(w, http.StatusUnauthorized, "invalid_api_key", "Incorrect API key provided")
	case bad != nil:
		fail(w, http.StatusBadRequest, "invalid_json", bad.Error())
	default:
		s.answer(w, r, &req, s.script(n, &req))
	}
}

func fail(w http.ResponseWriter, status int, code, text string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write(encode(object{"error": object{"code": code, "message": text, "type": "error"}}))
}

type object = map[string]any

func encode(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err) // maps of plain values always encode
	}
	return b
}

// answer writes a scripted answer.
func (s *Server) answer(w http.ResponseWriter, r *http.Request, req *Request, a Answer) {
	if a.Delay > 0 {
		select {
		case <-time.After(a.Delay):
		case <-r.Context().Done():
			return
		}
	}
	if a.Refuse {
		panic(http.ErrAbortHandler)
	}
	if a.Echo {
		a.Text += r.Header.Get("Authorization")
		a.ErrorText += r.Header.Get("Authorization")
		w.Header().Set("X-Echo", r.Header.Get("Authorization"))
	}
	if a.RetryAfter != "" {
		w.Header().Set("Retry-After", a.RetryAfter)
	}
	if a.Status != 0 && a.Status != http.StatusOK {
		fail(w, a.Status, a.ErrorCode, a.ErrorText)
		return
	}
	out := &cutter{w: w, left: a.CutAfter, limited: a.CutAfter > 0}
	switch {
	case a.Raw != "":
		w.Header().Set("Content-Type", a.RawType)
		_, _ = io.WriteString(out, a.Raw)
	case req.Stream:
		w.Header().Set("Content-Type", "text/event-stream")
		a.stream(r, out, req)
	default:
		w.Header().Set("Content-Type", "application/json")
		_, _ = out.Write(a.whole(req))
	}
}

var errCut = errors.New("cut")

// cutter cuts the connection after so many bytes.
type cutter struct {
	w       http.ResponseWriter
	left    int
	limited bool
}

func (c *cutter) Write(p []byte) (int, error) {
	if c.limited && len(p) >= c.left {
		_, _ = c.w.Write(p[:c.left])
		_ = http.NewResponseController(c.w).Flush()
		panic(http.ErrAbortHandler)
	}
	c.left -= len(p)
	n, err := c.w.Write(p)
	if err != nil {
		return n, errCut
	}
	return n, http.NewResponseController(c.w).Flush()
}

func (a *Answer) finish() string {
	switch {
	case a.Finish != "":
		return a.Finish
	case len(a.ToolCalls) > 0:
		return "tool_calls"
	}
	return "stop"
}

func (u *Usage) object() object {
	return object{
		"prompt_tokens": u.Prompt, "completion_tokens": u.Completion, "total_tokens": u.Prompt + u.Completion,
		"prompt_tokens_details": object{"cached_tokens": u.Cached},
	}
}

func (a *Answer) whole(req *Request) []byte {
	message := object{"role": "assistant", "content": a.Text}
	var calls []object
	for _, c := range a.ToolCalls {
		calls = append(calls, object{"id": c.ID, "type": "function", "function": object{"name": c.Name, "arguments": c.Arguments}})
	}
	if calls != nil {
		message["tool_calls"] = calls
	}
	doc := object{
		"id": "chatcmpl-double", "object": "chat.completion", "created": 1, "model": req.Model,
		"choices": []object{{"index": 0, "message": message, "finish_reason": a.finish()}},
	}
	if a.Usage != nil {
		doc["usage"] = a.Usage.object()
	}
	return encode(doc)
}

// stream writes the answer in chunks, the parallel tool calls interleaved.
func (a *Answer) stream(r *http.Request, w io.Writer, req *Request) {
	send := func(choices []object, usage any) bool {
		chunk := object{"id": "chatcmpl-double", "object": "chat.completion.chunk", "created": 1, "model": req.Model, "choices": choices}
		if req.StreamOptions.IncludeUsage {
			chunk["usage"] = usage
		}
		if a.Pause > 0 {
			select {
			case <-time.After(a.Pause):
			case <-r.Context().Done():
				return false
			}
		}
		_, err := fmt.Fprintf(w, "data: %s\n\n", encode(chunk))
		return err == nil && r.Context().Err() == nil
	}
	delta := func(d object, reason any) bool {
		return send([]object{{"index": 0, "delta": d, "finish_reason": reason}}, nil)
	}
	delta(object{"role": "assistant", "content": ""}, nil)
	for again := true; again; again = a.Endless {
		for _, piece := range pieces(a.Text, a.Piece) {
			if !delta(object{"content": piece}, nil) {
				return
			}
		}
	}
	if a.ErrorCode != "" {
		_, _ = fmt.Fprintf(w, "data: %s\n\n", encode(object{"error": object{"code": a.ErrorCode, "message": a.ErrorText}}))
		return
	}
	a.streamCalls(delta)
	delta(object{}, a.finish())
	if a.Usage != nil && req.StreamOptions.IncludeUsage {
		send([]object{}, a.Usage.object())
	}
	_, _ = io.WriteString(w, "data: [DONE]\n\n")
}

func (a *Answer) streamCalls(delta func(object, any) bool) {
	rest := make([][]string, len(a.ToolCalls))
	for i, c := range a.ToolCalls {
		delta(object{"tool_calls": []object{{"index": i, "id": c.ID, "type": "function", "function": object{"name": c.Name, "arguments": ""}}}}, nil)
		rest[i] = pieces(c.Arguments, a.Piece)
	}
	for more := true; more; {
		more = false
		for i := range rest {
			if len(rest[i]) == 0 {
				continue
			}
			delta(object{"tool_calls": []object{{"index": i, "function": object{"arguments": rest[i][0]}}}}, nil)
			rest[i], more = rest[i][1:], true
		}
	}
}

// pieces cuts s into parts of about n bytes, never inside a character.
func pieces(s string, n int) []string {
	if n <= 0 {
		n = 5
	}
	var out []string
	for s != "" {
		end := min(n, len(s))
		for end < len(s) && !utf8.RuneStart(s[end]) {
			end++
		}
		out, s = append(out, s[:end]), s[end:]
	}
	return out
}
