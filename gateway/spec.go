package gateway

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/segmentio/encoding/json"

	"github.com/ephemeral-run/ephemeral/run"
)

// Limits and defaults of a run's request. Sizes are bytes of UTF-8.
const (
	maxPrompt          = 128 << 10
	maxCommand         = 64 << 10 // one argument of execve(2) ends at 128 KiB; larger programs belong into files
	maxModel           = 128
	maxConnections     = 16
	maxConnectionName  = 64
	maxMetadata        = 16
	maxMetadataKey     = 64
	maxMetadataValue   = 512
	minTimeoutSeconds  = 1
	maxTimeoutSeconds  = 3600
	defaultTimeout     = 120
	minCostMicros      = 1
	maxCostMicros      = 100_000_000
	defaultCostMicros  = 40_000
	minRetention       = 60 // seconds
	maxRetention       = 10 * 365 * 86400
	fingerprintVersion = "run/1\n" // changes whenever the canonical form does
	fingerprintFiles   = "run/2\n" // of a request with files
)

// rules is what validation asks about the world.
type rules struct {
	hasModel      func(model string) bool
	defaultModel  string
	hasConnection func(name string) bool
	images        []string // that the cell serves
	imagesKnown   bool     // false: no node has said yet
}

// request is a run's request while it is read: what was absent must be told from what was zero.
type request struct {
	spec   run.Spec
	given  names // members of the body
	budget int64
	time   int64
	keep   int64
}

// names are the members that an object has: few enough to look through, and none twice.
type names []string

func (n names) has(name string) bool { return slices.Contains(n, name) }

// parseSpec reads and checks the body of POST /v1/runs and fills in the defaults. The error is a *Problem that names
// every field at fault.
func parseSpec(body []byte, r rules) (run.Spec, error) {
	req := request{
		spec:   run.Spec{Shell: true},
		given:  make(names, 0, 16),
		budget: defaultCostMicros,
		time:   defaultTimeout,
	}
	d, err := decodeObject(body, req.member)
	if err != nil {
		return run.Spec{}, err
	}
	if len(d.fields) > 0 {
		return run.Spec{}, problem(CodeInvalidRequest, "", d.fields...)
	}
	if p := req.check(r); p != nil {
		return run.Spec{}, p
	}
	return req.spec, nil
}

// member reads one member of the body.
func (q *request) member(d *decoder, name string) error {
	q.given = append(q.given, name)
	s := &q.spec
	switch name {
	case "prompt":
		return d.text(name, &s.Prompt)
	case "command":
		return d.text(name, &s.Command)
	case "model":
		return d.text(name, &s.Model)
	case "image":
		return d.text(name, &s.Image)
	case "web":
		return d.flag(name, &s.Web)
	case "shell":
		return d.flag(name, &s.Shell)
	case "files":
		return d.array(name, maxFiles, q.file)
	case "connections":
		return d.array(name, maxConnections, func(d *decoder, path string) error {
			var c string
			err := d.text(path, &c)
			s.Connections = append(s.Connections, c)
			return err
		})
	case "timeout_seconds":
		return d.integer(name, &q.time)
	case "max_cost_micros":
		return d.integer(name, &q.budget)
	case "expose_broker":
		return d.flag(name, &s.ExposeBroker)
	case "zero_data_retention":
		return d.flag(name, &s.ZeroDataRetention)
	case "retention_seconds":
		return d.integer(name, &q.keep)
	case "metadata":
		return d.object(name, q.metadata)
	}
	q.given = q.given[:len(q.given)-1]
	return errUnknownField
}

// file reads one element of files.
func (q *request) file(d *decoder, path string) error {
	var f run.File
	given, faults := map[string]bool{}, len(d.fields)
	err := d.object(path, func(d *decoder, name string) error {
		given[name] = true
		switch name {
		case "path":
			return d.text(path+".path", &f.Path)
		case "content":
			return d.text(path+".content", &f.Content)
		case "encoding":
			return d.text(path+".encoding", &f.Encoding)
		case "mode":
			return d.text(path+".mode", &f.Mode)
		case "upload":
			return d.text(path+".upload", (*string)(&f.Upload))
		}
		return errUnknownField
	})
	if err == nil && !given["path"] {
		d.fail(path+".path", "is required")
	}
	switch {
	case err != nil:
	case !given["content"] && !given["upload"]:
		d.fail(path+".content", "is required, unless upload is given")
	case given["content"] && given["upload"]:
		d.fail(path+".upload", "cannot be given together with content")
	case given["encoding"] && given["upload"]:
		d.fail(path+".encoding", "cannot be given together with upload")
	case given["upload"] && f.Upload == "" && len(d.fields) == faults:
		d.fail(path+".upload", "is empty")
	}
	q.spec.Files = append(q.spec.Files, f)
	return err
}

// metadata reads one entry of metadata.
func (q *request) metadata(d *decoder, key string) error {
	var v string
	if err := d.text(join("metadata", key), &v); err != nil {
		return err
	}
	if q.spec.Metadata == nil {
		q.spec.Metadata = map[string]string{}
	}
	if len(q.spec.Metadata) <= maxMetadata { // one too many is enough to know
		q.spec.Metadata[key] = v
	}
	return nil
}

// check decides on the values and fills in the defaults.
func (q *request) check(r rules) *Problem {
	var v violations
	v.prompt(q)
	v.number("timeout_seconds", q.time, minTimeoutSeconds, maxTimeoutSeconds)
	v.number("max_cost_micros", q.budget, minCostMicros, maxCostMicros)
	q.spec.TimeoutSeconds, q.spec.MaxCostMicros = int(q.time), run.Micros(q.budget)
	if q.given.has("retention_seconds") {
		v.number("retention_seconds", q.keep, minRetention, maxRetention)
		q.spec.RetentionSeconds = int(q.keep)
	}
	v.image(q, r)
	v.files(q.spec.Files)
	v.metadata(q.spec.Metadata)
	if q.given.has("command") {
		v.commandOnly(q)
	}
	if !q.given.has("command") || q.spec.ExposeBroker {
		v.model(q, r)
		v.connections(q.spec.Connections, r)
	}
	return v.problem()
}

// violations collects what is wrong with a request's values.
type violations struct {
	fields []FieldError
	codes  map[Code]bool
}

func (v *violations) add(code Code, field, detail string) {
	if v.codes == nil {
		v.codes = map[Code]bool{}
	}
	v.codes[code] = true
	v.fields = append(v.fields, FieldError{field, detail})
}

func (v *violations) invalid(field, format string, args ...any) {
	v.add(CodeInvalidRequest, field, fmt.Sprintf(format, args...))
}

// problem is nil when nothing is wrong. A special code is used only when it explains everything.
func (v *violations) problem() *Problem {
	if len(v.fields) == 0 {
		return nil
	}
	code := CodeInvalidRequest
	if len(v.codes) == 1 {
		for c := range v.codes {
			code = c
		}
	}
	return problem(code, "", v.fields...)
}

// prompt checks that there is exactly one of prompt and command and that it says something.
func (v *violations) prompt(q *request) {
	switch {
	case q.given.has("prompt") && q.given.has("command"):
		v.invalid("prompt", "cannot be given together with command")
		v.invalid("command", "cannot be given together with prompt")
	case q.given.has("prompt"):
		v.content("prompt", q.spec.Prompt, maxPrompt)
	case q.given.has("command"):
		v.content("command", q.spec.Command, maxCommand)
		if strings.ContainsRune(q.spec.Command, 0) {
			v.invalid("command", "contains a NUL character")
		}
	default:
		v.invalid("prompt", "is required, unless command is given")
	}
}

func (v *violations) content(field, s string, limit int) {
	if strings.TrimSpace(s) == "" {
		v.invalid(field, "is empty")
	}
	if len(s) > limit {
		v.invalid(field, "has %d bytes, at most %d are allowed", len(s), limit)
	}
}

func (v *violations) number(field string, n, least, most int64) {
	if n < least || n > most {
		v.invalid(field, "must be between %d and %d", least, most)
	}
}

// commandOnly refuses what a command cannot use: it runs without model, web and connections, unless its programs reach
// the broker.
func (v *violations) commandOnly(q *request) {
	if q.given.has("prompt") {
		return // said already
	}
	alone := !q.spec.ExposeBroker
	if alone && q.given.has("model") {
		v.invalid("model", "cannot be used with command, which runs without a model unless expose_broker is true")
	}
	if alone && q.spec.Web {
		v.invalid("web", "cannot be used with command unless expose_broker is true")
	}
	if !q.spec.Shell {
		v.invalid("shell", "cannot be false with command, which runs in the shell")
	}
	if alone && len(q.spec.Connections) > 0 {
		v.invalid("connections", "cannot be used with command unless expose_broker is true")
	}
}

// model fills in the default model and checks that the model exists.
func (v *violations) model(q *request, r rules) {
	if !q.given.has("model") {
		q.spec.Model = r.defaultModel
		if q.spec.Model == "" {
			v.invalid("model", "is required, since this server has no default model")
		}
		return
	}
	if m := q.spec.Model; m == "" || len(m) > maxModel || r.hasModel == nil || !r.hasModel(m) {
		v.add(CodeUnknownModel, "model", "is not a model of this server: "+shorten(m))
	}
}

func (v *violations) connections(names []string, r rules) {
	seen := map[string]bool{}
	for i, name := range names {
		field := fmt.Sprintf("connections[%d]", i)
		switch {
		case seen[name]:
			v.invalid(field, "is there twice: %s", shorten(name))
		case name == "" || len(name) > maxConnectionName || r.hasConnection == nil || !r.hasConnection(name):
			v.add(CodeUnknownConnection, field, "is not a connection of your organisation: "+shorten(name))
		}
		seen[name] = true
	}
}

func (v *violations) metadata(m map[string]string) {
	if len(m) > maxMetadata {
		v.invalid("metadata", "has too many entries, at most %d are allowed", maxMetadata)
	}
	keys := make([]string, 0, maxMetadata+1)
	for key := range m {
		keys = append(keys, key)
	}
	slices.Sort(keys)
	for _, key := range keys {
		value := m[key]
		field := join("metadata", key)
		if key == "" || len(key) > maxMetadataKey || hasControl(key) {
			v.invalid(field, "must have a key of 1 to %d bytes without control characters", maxMetadataKey)
		}
		if len(value) > maxMetadataValue {
			v.invalid(field, "has %d bytes, at most %d are allowed", len(value), maxMetadataValue)
		}
	}
}

// fingerprint is the SHA-256 of the accepted request in canonical form: white space, the order of keys and defaults written out
// make no difference. The form of a request without files is returned too; with files it has their hashes in their place, so that
// they are not copied.
func fingerprint(s run.Spec) (sum, canonical string, err error) {
	version := fingerprintVersion
	if len(s.Files) > 0 {
		version = fingerprintFiles
		if s.Files, err = hashed(s.Files); err != nil {
			return "", "", err
		}
	}
	b, err := json.Append(nil, &s, json.EscapeHTML|json.SortMapKeys) // as json.Marshal: fields in declared order
	if err != nil {
		return "", "", fmt.Errorf("encode request for fingerprint: %w", err)
	}
	h := sha256.New()
	h.Write([]byte(version))
	h.Write(b)
	sum = hex.EncodeToString(h.Sum(nil))
	if len(s.Files) > 0 {
		return sum, "", nil
	}
	return sum, string(b), nil
}

// hashed are the files with hashes for contents.
func hashed(files []run.File) ([]run.File, error) {
	files = slices.Clone(files)
	for i, f := range files {
		if f.Upload != "" {
			continue
		}
		sum := sha256.New()
		// In pieces: io.WriteString would copy it.
		if _, err := io.Copy(sum, io.LimitReader(strings.NewReader(f.Content), int64(len(f.Content)))); err != nil {
			return nil, fmt.Errorf("hash file %d of the request: %w", i, err)
		}
		files[i].Content = hex.EncodeToString(sum.Sum(nil))
	}
	return files, nil
}
