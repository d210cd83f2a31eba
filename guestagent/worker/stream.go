package worker

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
)

const maxLine = 1 << 20

// chunk is one event of a streamed answer.
type chunk struct {
	Choices []struct {
		Delta struct {
			Content   string `json:"content"`
			Refusal   string `json:"refusal"`
			ToolCalls []struct {
				Index    int    `json:"index"`
				ID       string `json:"id"`
				Function struct {
					Name      string `json:"name"`
					Arguments string `json:"arguments"`
				} `json:"function"`
			} `json:"tool_calls"`
		} `json:"delta"`
		FinishReason string `json:"finish_reason"`
	} `json:"choices"`
	Error *errorDocument `json:"error"`
}

var (
	errTooMuch = errors.New("the model's answer is too long")
	dataField  = []byte("data:")
)

// readStream puts a streamed answer together.
func readStream(r io.Reader) (*answer, error) {
	lines := bufio.NewScanner(r)
	lines.Buffer(make([]byte, 0, 8<<10), maxLine)
	b := builder{at: map[int]int{}}
	for lines.Scan() {
		// Providers write every event as one data line.
		data, ok := bytes.CutPrefix(lines.Bytes(), dataField)
		if !ok {
			continue
		}
		data = bytes.TrimSpace(data)
		if string(data) == "[DONE]" {
			return b.answer()
		}
		var c chunk
		if err := json.Unmarshal(data, &c); err != nil {
			return nil, fmt.Errorf("%w: %w", errBroken, err)
		}
		if c.Error != nil {
			return nil, fmt.Errorf("%w: %s", errBroken, bound(c.Error.Message, 1<<10))
		}
		if err := b.add(&c); err != nil {
			return nil, err
		}
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("%w: %w", errBroken, err)
	}
	return b.answer()
}

// builder gathers an answer from its pieces.
type builder struct {
	text   bytes.Buffer
	calls  []callBuilder
	at     map[int]int // the place in calls of a tool call's index
	finish string
}

type callBuilder struct {
	id, name  string
	arguments bytes.Buffer
}

func (b *builder) add(c *chunk) error {
	for _, choice := range c.Choices {
		d := &choice.Delta
		b.text.WriteString(d.Content)
		b.text.WriteString(d.Refusal)
		if b.text.Len() > maxText {
			return errTooMuch
		}
		for _, t := range d.ToolCalls {
			i, ok := b.at[t.Index]
			// Some providers number every call 0 and tell them apart by their ids.
			if !ok || t.ID != "" && b.calls[i].id != "" && t.ID != b.calls[i].id {
				if i = len(b.calls); i >= maxCalls {
					return errTooMuch
				}
				b.calls = append(b.calls, callBuilder{})
				b.at[t.Index] = i
			}
			call := &b.calls[i]
			if t.ID != "" {
				call.id = t.ID
			}
			if call.name == "" {
				call.name = t.Function.Name
			}
			call.arguments.WriteString(t.Function.Arguments)
			if call.arguments.Len() > maxArguments || len(call.id)+len(call.name) > 1<<10 {
				return errTooMuch
			}
		}
		if choice.FinishReason != "" {
			b.finish = choice.FinishReason
		}
	}
	return nil
}

// answer is what was gathered, when the model came to an end.
func (b *builder) answer() (*answer, error) {
	if b.finish == "" {
		return nil, errBroken
	}
	a := &answer{text: b.text.String(), cut: b.finish == "length"}
	for i := range b.calls {
		c := &b.calls[i]
		a.calls = append(a.calls, call{id: c.id, name: c.name, arguments: c.arguments.String()})
	}
	return a, nil
}
