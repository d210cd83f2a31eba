package broker

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strings"
)

// The bounds of a chat-completions request.
const (
	maxMessages = 4096
	maxTools    = 128
	maxLimit    = 1 << 24 // output tokens
)

// allowedFields are the fields that go on to a provider. Others are refused: some cost more than tokens say, some make the
// provider fetch from or write to elsewhere.
var allowedFields = map[string]bool{
	"model": true, "messages": true, "stream": true, "stream_options": true,
	fieldMaxTokens: true, fieldMaxCompletionTokens: true, "n": true,
	"tools": true, "tool_choice": true, "parallel_tool_calls": true,
	"temperature": true, "top_p": true, "stop": true, "seed": true, "presence_penalty": true, "frequency_penalty": true,
	"logit_bias": true, "logprobs": true, "top_logprobs": true, "response_format": true, "reasoning_effort": true, "verbosity": true,
}

var allowedRoles = map[string]bool{"system": true, "developer": true, "user": true, "assistant": true, "tool": true}

// chatRequest is a checked chat-completions request.
type chatRequest struct {
	model        string
	stream       bool
	includeUsage bool  // the guest wants the usage in the stream
	limit        int64 // output tokens; 0: none given
	fields       map[string]any
}

func invalid(param, format string, args ...any) *problem {
	return &problem{status: http.StatusBadRequest, code: codeInvalid, message: fmt.Sprintf(format, args...), param: param}
}

// parseRequest checks a request body. It returns a *problem for whatever is not a plain text chat with function tools.
func parseRequest(data []byte) (*chatRequest, error) {
	fields, err := decodeObject(data)
	if err != nil {
		return nil, invalid("", "the body is no JSON object: %v", err)
	}
	for _, name := range slices.Sorted(maps.Keys(fields)) {
		if !allowedFields[name] {
			return nil, invalid(clip(name), "the field is not supported")
		}
	}
	r := &chatRequest{fields: fields}
	for _, check := range []func() error{r.checkModel, r.checkStream, r.checkLimits, r.checkMessages, r.checkTools} {
		if err := check(); err != nil {
			return nil, err
		}
	}
	return r, nil
}

// decodeObject reads exactly one JSON object. Of fields that are there twice the last one counts, for us and, since the
// object is encoded anew, for the provider.
func decodeObject(data []byte) (map[string]any, error) {
	d := json.NewDecoder(bytes.NewReader(data))
	d.UseNumber()
	var v map[string]any
	if err := d.Decode(&v); err != nil {
		var syntax *json.SyntaxError
		if errors.As(err, &syntax) {
			return nil, fmt.Errorf("byte %d: %w", syntax.Offset, err)
		}
		return nil, err
	}
	if v == nil {
		return nil, errors.New("it is null")
	}
	if _, err := d.Token(); err != io.EOF {
		return nil, errors.New("something follows it")
	}
	return v, nil
}

func (r *chatRequest) checkModel() error {
	v, ok := r.fields["model"]
	if !ok {
		return nil // the run's model
	}
	if r.model, ok = v.(string); !ok || r.model == "" {
		return invalid("model", "want a model's id")
	}
	return nil
}

func (r *chatRequest) checkStream() error {
	var ok bool
	if v, have := r.fields["stream"]; have && v != nil {
		if r.stream, ok = v.(bool); !ok {
			return invalid("stream", "want true or false")
		}
	}
	v, have := r.fields["stream_options"]
	if !have || v == nil {
		return nil
	}
	options, ok := v.(map[string]any)
	if !ok {
		return invalid("stream_options", "want an object")
	}
	for name, v := range options {
		if name != "include_usage" {
			return invalid("stream_options."+clip(name), "the field is not supported")
		}
		if r.includeUsage, ok = v.(bool); !ok {
			return invalid("stream_options.include_usage", "want true or false")
		}
	}
	return nil
}

func (r *chatRequest) checkLimits() error {
	for _, name := range []string{fieldMaxTokens, fieldMaxCompletionTokens} {
		v, have := r.fields[name]
		if !have || v == nil {
			continue
		}
		n, err := integer(v)
		if err != nil || n < 1 || n > maxLimit {
			return invalid(name, "want a whole number from 1 to %d", maxLimit)
		}
		if r.limit == 0 || n < r.limit {
			r.limit = n
		}
	}
	if v, have := r.fields["n"]; have && v != nil {
		if n, err := integer(v); err != nil || n != 1 {
			return invalid("n", "only 1 is supported")
		}
	}
	return nil
}

func integer(v any) (int64, error) {
	n, ok := v.(json.Number)
	if !ok {
		return 0, errors.New("not a number")
	}
	return n.Int64()
}

func (r *chatRequest) checkMessages() error {
	list, ok := r.fields["messages"].([]any)
	if !ok || len(list) == 0 || len(list) > maxMessages {
		return invalid("messages", "want a list of 1 to %d messages", maxMessages)
	}
	for i, v := range list {
		at := fmt.Sprintf("messages[%d]", i)
		m, ok := v.(map[string]any)
		if !ok {
			return invalid(at, "want an object")
		}
		if role, _ := m["role"].(string); !allowedRoles[role] {
			return invalid(at+".role", "want system, developer, user, assistant or tool")
		}
		if m["audio"] != nil {
			return invalid(at+".audio", "only text is supported")
		}
		if err := checkContent(at+".content", m["content"]); err != nil {
			return err
		}
	}
	return nil
}

// checkContent lets text pass, and nothing that costs more tokens than it has bytes or that a provider would fetch.
func checkContent(at string, content any) error {
	switch c := content.(type) {
	case nil, string:
		return nil
	case []any:
		for i, v := range c {
			part, ok := v.(map[string]any)
			if kind, _ := part["type"].(string); !ok || kind != "text" && kind != "refusal" {
				return invalid(fmt.Sprintf("%s[%d].type", at, i), "only text is supported")
			}
		}
		return nil
	}
	return invalid(at, "want text or a list of parts")
}

func (r *chatRequest) checkTools() error {
	v, have := r.fields["tools"]
	if !have || v == nil {
		return nil
	}
	list, ok := v.([]any)
	if !ok || len(list) > maxTools {
		return invalid("tools", "want a list of at most %d tools", maxTools)
	}
	for i, v := range list {
		tool, _ := v.(map[string]any)
		if kind, _ := tool["type"].(string); kind != "function" {
			return invalid(fmt.Sprintf("tools[%d].type", i), "only function is supported")
		}
	}
	return nil
}

// body is the request as it is sent to a provider: its own name of the model, its field for the limit, usage always asked
// for where that is possible.
func (r *chatRequest) body(model string, p *provider, limit int64) (string, error) {
	fields := maps.Clone(r.fields)
	delete(fields, fieldMaxTokens)
	delete(fields, fieldMaxCompletionTokens)
	delete(fields, "stream_options")
	fields["model"] = model
	fields[p.limitField] = limit
	if r.stream && p.streamUsage {
		fields["stream_options"] = map[string]any{"include_usage": true}
	}
	var b strings.Builder
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(fields); err != nil {
		return "", fmt.Errorf("encode request: %w", err)
	}
	return strings.TrimSuffix(b.String(), "\n"), nil
}

// clip shortens what a guest wrote for an error message.
func clip(s string) string {
	const most = 64
	if len(s) > most {
		return strings.ToValidUTF8(s[:most], "") + "..."
	}
	return s
}
