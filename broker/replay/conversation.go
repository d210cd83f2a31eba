package replay

import (
	"bytes"
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"regexp"
	"strings"
	"text/template"

	"github.com/goccy/go-yaml"
)

// The bounds of a conversation file.
const (
	maxFile   = 1 << 20
	maxSteps  = 1000
	maxCalls  = 32
	maxTokens = 1 << 30
	maxFiles  = 1000
)

//go:embed conversations
var embedded embed.FS

// Conversation is one file, checked and ready to play. It does not change.
type Conversation struct {
	Name        string
	Description string
	steps       []step
}

type step struct {
	text  *template.Template
	calls []toolCall
	usage usage
}

type toolCall struct {
	id, name  string
	arguments string // a JSON object
}

type usage struct {
	input, cached, output int64
}

// file is the form of a conversation file.
type file struct {
	Version     int        `yaml:"version"`
	Description string     `yaml:"description"`
	Steps       []fileStep `yaml:"steps"`
}

type fileStep struct {
	Text      string     `yaml:"text"`
	ToolCalls []fileCall `yaml:"tool_calls"`
	Usage     fileUsage  `yaml:"usage"`
}

type fileCall struct {
	ID        string         `yaml:"id"`
	Name      string         `yaml:"name"`
	Arguments map[string]any `yaml:"arguments"`
}

type fileUsage struct {
	InputTokens       int64 `yaml:"input_tokens"`
	CachedInputTokens int64 `yaml:"cached_input_tokens"`
	OutputTokens      int64 `yaml:"output_tokens"`
}

// namePattern is what conversations and tools may be called; it is that of function names in the protocol.
var namePattern = regexp.MustCompile(`^[A-Za-z0-9_.-]{1,64}$`)

// Load returns the built-in conversations, and those of the directory, which replace built-in ones of the same name. An
// empty dir is none.
func Load(dir string) (map[string]*Conversation, error) {
	all := map[string]*Conversation{}
	built, err := fs.Sub(embedded, "conversations")
	if err != nil {
		return nil, fmt.Errorf("built-in conversations: %w", err)
	}
	if err := loadAll(all, built); err != nil {
		return nil, fmt.Errorf("built-in conversations: %w", err)
	}
	if dir == "" {
		return all, nil
	}
	if err := loadAll(all, os.DirFS(dir)); err != nil {
		return nil, fmt.Errorf("conversations in %s: %w", dir, err)
	}
	return all, nil
}

func loadAll(all map[string]*Conversation, from fs.FS) error {
	entries, err := fs.ReadDir(from, ".")
	if err != nil {
		return err
	}
	if len(entries) > maxFiles {
		return fmt.Errorf("%d files, at most %d are read", len(entries), maxFiles)
	}
	for _, e := range entries {
		ext := path.Ext(e.Name())
		if e.IsDir() || ext != ".yaml" && ext != ".yml" && ext != ".json" {
			continue
		}
		info, err := fs.Stat(from, e.Name())
		if err != nil {
			return err
		}
		if info.Size() > maxFile {
			return fmt.Errorf("%s: %d bytes, at most %d are read", e.Name(), info.Size(), maxFile)
		}
		data, err := fs.ReadFile(from, e.Name())
		if err != nil {
			return err
		}
		c, err := Parse(strings.TrimSuffix(e.Name(), ext), data)
		if err != nil {
			return fmt.Errorf("%s: %w", e.Name(), err)
		}
		all[c.Name] = c
	}
	return nil
}

// Parse reads a conversation file.
func Parse(name string, data []byte) (*Conversation, error) {
	if !namePattern.MatchString(name) {
		return nil, fmt.Errorf("name %.80q: want 1 to 64 letters, digits, '_', '-' or '.'", name)
	}
	var f file
	if err := yaml.UnmarshalWithOptions(data, &f, yaml.Strict()); err != nil {
		return nil, err
	}
	if f.Version != 1 {
		return nil, fmt.Errorf("version %d: want 1", f.Version)
	}
	if len(f.Steps) == 0 || len(f.Steps) > maxSteps {
		return nil, fmt.Errorf("%d steps: want 1 to %d", len(f.Steps), maxSteps)
	}
	c := &Conversation{Name: name, Description: f.Description}
	ids := map[string]bool{}
	for i, fs := range f.Steps {
		s, err := fs.step(ids)
		if err != nil {
			return nil, fmt.Errorf("step %d: %w", i+1, err)
		}
		c.steps = append(c.steps, s)
	}
	return c, nil
}

func (fs fileStep) step(ids map[string]bool) (step, error) {
	if fs.Text == "" && len(fs.ToolCalls) == 0 {
		return step{}, errors.New("neither text nor tool calls")
	}
	if len(fs.ToolCalls) > maxCalls {
		return step{}, fmt.Errorf("%d tool calls, at most %d", len(fs.ToolCalls), maxCalls)
	}
	s := step{usage: usage{fs.Usage.InputTokens, fs.Usage.CachedInputTokens, fs.Usage.OutputTokens}}
	if u := s.usage; u.input < 0 || u.cached < 0 || u.output < 0 || u.cached > u.input || u.input > maxTokens || u.output > maxTokens {
		return step{}, fmt.Errorf("usage %+v: want counts of 0 to %d, no more cached than input", fs.Usage, maxTokens)
	}
	var err error
	if s.text, err = newTemplate(fs.Text); err != nil {
		return step{}, err
	}
	for _, fc := range fs.ToolCalls {
		if !namePattern.MatchString(fc.ID) || ids[fc.ID] {
			return step{}, fmt.Errorf("tool call id %.80q: want a unique name of 1 to 64 letters, digits, '_', '-' or '.'", fc.ID)
		}
		ids[fc.ID] = true
		if !namePattern.MatchString(fc.Name) {
			return step{}, fmt.Errorf("tool call %s: name %.80q is not a function's name", fc.ID, fc.Name)
		}
		call := toolCall{id: fc.ID, name: fc.Name, arguments: "{}"}
		if fc.Arguments != nil {
			if call.arguments, err = encode(fc.Arguments); err != nil {
				return step{}, fmt.Errorf("tool call %s: arguments: %w", fc.ID, err)
			}
		}
		s.calls = append(s.calls, call)
	}
	return s, nil
}

// encode is JSON without the escapes that only HTML needs.
func encode(v any) (string, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		return "", err
	}
	return strings.TrimSuffix(b.String(), "\n"), nil
}
