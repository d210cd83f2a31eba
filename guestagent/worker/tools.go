package worker

import (
	"context"
	_ "embed"
	"encoding/json"
	"fmt"
	"strings"
)

// maxResult bounds a tool's result as the model sees it, in bytes.
const maxResult = 16 << 10

// definitions describes all tools as the protocol wants it; a run is offered some of them.
//
//go:embed tools.json
var definitions []byte

// tool is what a model may call.
type tool struct {
	definition json.RawMessage
	// do makes one call. arguments is JSON of any form. What it returns is for the model, errors too.
	do func(w *worker, ctx context.Context, arguments []byte) string
}

// doers are the tools by name, and when a run is offered them.
var doers = map[string]struct {
	offered func(*permits) bool
	do      func(w *worker, ctx context.Context, arguments []byte) string
}{
	"shell":              {func(p *permits) bool { return p.shell }, (*worker).shell},
	"read_file":          {func(p *permits) bool { return p.files }, (*worker).readFile},
	"write_file":         {func(p *permits) bool { return p.files }, (*worker).writeFile},
	"web_fetch":          {func(p *permits) bool { return p.web }, (*worker).webFetch},
	"web_search":         {func(p *permits) bool { return p.search }, (*worker).webSearch},
	"connection_request": {func(p *permits) bool { return p.has(kindHTTP) }, (*worker).connectionRequest},
	"sql_query":          {func(p *permits) bool { return p.has(kindPostgres) }, (*worker).sqlQuery},
}

// permits is what a run is allowed, as far as the machine can use it.
type permits struct {
	shell, files, web, search, door bool
	connections                     []connection
}

func (p *permits) has(kind string) bool {
	for _, c := range p.connections {
		if c.Kind == kind {
			return true
		}
	}
	return false
}

// offer returns the tools that a run may call, and their definitions as a request carries them: nil when there are none.
func offer(p *permits) (map[string]tool, json.RawMessage, error) {
	var all []json.RawMessage
	if err := json.Unmarshal(definitions, &all); err != nil {
		return nil, nil, fmt.Errorf("definitions of tools: %w", err)
	}
	tools, offered := map[string]tool{}, []json.RawMessage{}
	for _, definition := range all {
		var d struct {
			Function struct {
				Name string `json:"name"`
			} `json:"function"`
		}
		if err := json.Unmarshal(definition, &d); err != nil {
			return nil, nil, fmt.Errorf("definition of a tool: %w", err)
		}
		doer, known := doers[d.Function.Name]
		if !known {
			return nil, nil, fmt.Errorf("tool %q is defined and not there", d.Function.Name)
		}
		if doer.offered(p) {
			tools[d.Function.Name] = tool{definition, doer.do}
			offered = append(offered, definition)
		}
	}
	if len(offered) == 0 {
		return tools, nil, nil
	}
	body, err := json.Marshal(offered)
	return tools, body, err
}

// use does what a tool call asks for. Whatever is wrong with the call is told to the model, which can do better.
func (w *worker) use(ctx context.Context, c call) string {
	t, ok := w.tools[c.name]
	if !ok {
		others := "There are no tools in this task."
		if names := w.toolNames(); len(names) > 0 {
			others = "The tools of this task: " + strings.Join(names, ", ") + "."
		}
		return fmt.Sprintf("error: there is no tool %q. %s", clean(bound(c.name, 64)), others)
	}
	return clean(t.do(w, ctx, []byte(c.arguments)))
}

// parse reads the arguments of a call. The error is for the model.
func parse(arguments []byte, into any) error {
	if err := json.Unmarshal(arguments, into); err != nil {
		return fmt.Errorf("the arguments are not the JSON object that the tool takes: %w. They were: %s", err, bound(string(arguments), 512))
	}
	return nil
}

// failure is a result that says what went wrong.
func failure(err error) string { return "error: " + bound(err.Error(), 4<<10) }

// clean makes text of output: JSON cannot carry other bytes, and some providers refuse NUL.
func clean(s string) string {
	return strings.ToValidUTF8(strings.ReplaceAll(s, "\x00", "\uFFFD"), "\uFFFD")
}
