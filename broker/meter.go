package broker

import (
	"encoding/json"
	"fmt"
)

// maxReported is the greatest token count that is believed.
const maxReported = 1 << 30

// completion is what the broker reads of an answer, whole or a chunk of a stream.
type completion struct {
	Choices []struct {
		Index        int     `json:"index"`
		Delta        message `json:"delta"`
		Message      message `json:"message"`
		FinishReason *string `json:"finish_reason"`
	} `json:"choices"`
	Usage *usage          `json:"usage"`
	Error json.RawMessage `json:"error"`
}

type message struct {
	Content          *string `json:"content"`
	Refusal          *string `json:"refusal"`
	Reasoning        *string `json:"reasoning"`
	ReasoningContent *string `json:"reasoning_content"`
	ToolCalls        []struct {
		Index    int    `json:"index"`
		ID       string `json:"id"`
		Function struct {
			Name      string `json:"name"`
			Arguments string `json:"arguments"`
		} `json:"function"`
	} `json:"tool_calls"`
}

// usage is what a provider says a call used, in the fields that providers have for it.
type usage struct {
	Prompt     int64 `json:"prompt_tokens"`
	Completion int64 `json:"completion_tokens"` // hidden reasoning included
	Details    struct {
		Cached int64 `json:"cached_tokens"`
	} `json:"prompt_tokens_details"`
	CacheHit          int64 `json:"prompt_cache_hit_tokens"` // some say it so
	CompletionDetails struct {
		Reasoning int64 `json:"reasoning_tokens"`
	} `json:"completion_tokens_details"`
}

// cached are the input tokens that the provider read from its cache.
func (u *usage) cached() int64 { return max(u.Details.Cached, u.CacheHit) }

// reasoning are the output tokens that nobody sees.
func (u *usage) reasoning() int64 {
	return min(max(u.CompletionDetails.Reasoning, 0), u.Completion)
}

// sane tells whether the counts can be true.
func (u *usage) sane() bool {
	return u != nil && u.Prompt >= 0 && u.Prompt <= maxReported && u.Completion >= 0 && u.Completion <= maxReported &&
		u.Details.Cached >= 0 && u.CacheHit >= 0 && u.cached() <= u.Prompt
}

// texts gives every text of the answer to f, with a name that is the same for the pieces of one text.
func (c *completion) texts(f func(channel, text string)) {
	for i := range c.Choices {
		choice := &c.Choices[i]
		for _, m := range []*message{&choice.Delta, &choice.Message} {
			for name, s := range map[string]*string{"content": m.Content, "refusal": m.Refusal, "reasoning": m.Reasoning, "reasoning_content": m.ReasoningContent} {
				if s != nil && *s != "" {
					f(fmt.Sprint(choice.Index, name), *s)
				}
			}
			for _, t := range m.ToolCalls {
				for name, s := range map[string]string{"id": t.ID, "name": t.Function.Name, "arguments": t.Function.Arguments} {
					if s != "" {
						f(fmt.Sprint(choice.Index, "tool", t.Index, name), s)
					}
				}
			}
		}
	}
}

// meter measures an answer as it passes.
type meter struct {
	textBytes int64
	usage     *usage // the last that made sense
	finished  bool   // a reason of the end was given
}

func (m *meter) addChunk(c *completion) {
	c.texts(func(_, text string) { m.textBytes += int64(len(text)) })
	for i := range c.Choices {
		if r := c.Choices[i].FinishReason; r != nil && *r != "" {
			m.finished = true
		}
	}
	if c.Usage.sane() {
		m.usage = c.Usage
	}
}

func (m *meter) addWhole(c *completion) {
	m.addChunk(c)
	m.finished = true
}
