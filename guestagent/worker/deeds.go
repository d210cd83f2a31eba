package worker

import (
	"bytes"
	"fmt"
	"strings"
)

const (
	maxFinal = 256 << 10 // bytes of the final answer
	maxDeeds = 64        // that the final answer lists
)

// deed is one thing done, for an answer that the worker must write itself.
type deed struct {
	what, how string
}

func (w *worker) record(what, how string) {
	first, _, more := strings.Cut(strings.TrimSpace(what), "\n")
	if more {
		first += " ..."
	}
	w.done = append(w.done, deed{what: clean(bound(first, 256)), how: clean(how)})
}

// stopped ends with what was done so far.
func (w *worker) stopped(code, detail string) Result {
	detail = clean(bound(detail, 2<<10))
	var b bytes.Buffer
	fmt.Fprintf(&b, "The work ended without a final answer: %s\n", detail)
	if text := w.talk.lastText(); text != "" {
		fmt.Fprintf(&b, "\nThe last words of the model:\n%s\n", bound(text, 16<<10))
	}
	if len(w.done) == 0 {
		b.WriteString("\nNothing was done.\n")
	} else {
		fmt.Fprintf(&b, "\nTool calls made: %d\n", len(w.done))
		for _, d := range w.done[max(0, len(w.done)-maxDeeds):] {
			fmt.Fprintf(&b, "- %s: %s\n", d.what, d.how)
		}
	}
	return Result{Output: bound(strings.TrimSuffix(b.String(), "\n"), maxFinal), ErrorCode: code, ErrorDetail: detail}
}

// lastText is the last text of the model beside its tool calls.
func (t *conversation) lastText() string {
	for i := len(t.messages) - 1; i >= 0; i-- {
		if m := t.messages[i]; m.Role == "assistant" && m.Content != nil && *m.Content != "" {
			return *m.Content
		}
	}
	return ""
}
