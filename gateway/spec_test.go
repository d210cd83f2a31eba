package gateway

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/ephemeral-run/ephemeral/run"
)

// testRules knows one model besides the default and one connection.
var testRules = rules{
	hasModel:      func(m string) bool { return m == "openai/small" || m == "replay/proof" },
	defaultModel:  "replay/proof",
	hasConnection: func(c string) bool { return c == "billing" || c == "crm" },
	images:        []string{"base", "data"},
	imagesKnown:   true,
}

func TestParseSpecFillsDefaults(t *testing.T) {
	got, err := parseSpec([]byte(`{"prompt":"hi"}`), testRules)
	if err != nil {
		t.Fatal(err)
	}
	want := run.Spec{Prompt: "hi", Model: "replay/proof", Shell: true, TimeoutSeconds: 120, MaxCostMicros: 40_000}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
}

func TestParseSpecKeepsEverythingGiven(t *testing.T) {
	got, err := parseSpec([]byte(`{"prompt":"hé\u0000\ud83d\ude00","model":"openai/small","web":true,"shell":false,
		"files":[{"path":"a/b c.csv","content":"x\n"},{"path":"-n","content":"AAE=","encoding":"base64"},{"path":"empty","content":""}],
		"connections":["billing","crm"],"timeout_seconds":3600.0,"max_cost_micros":1e8,"zero_data_retention":true,
		"metadata":{"k":"v","é":""}}`), testRules)
	if err != nil {
		t.Fatal(err)
	}
	want := run.Spec{
		Prompt: "hé\x00😀", Model: "openai/small", Web: true,
		Files:       []run.File{{Path: "a/b c.csv", Content: "x\n"}, {Path: "-n", Content: "AAE=", Encoding: "base64"}, {Path: "empty"}},
		Connections: []string{"billing", "crm"}, TimeoutSeconds: 3600, MaxCostMicros: 100_000_000, ZeroDataRetention: true,
		Metadata: map[string]string{"k": "v", "é": ""},
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
}

// file writes a body with one file member after another.
func filesBody(files ...string) string {
	return `{"command":"x","files":[` + strings.Join(files, ",") + `]}`
}

func pathsBody(paths ...string) string {
	var files []string
	for _, p := range paths {
		name, err := json.Marshal(p)
		if err != nil {
			panic(err)
		}
		files = append(files, fmt.Sprintf(`{"path":%s,"content":""}`, name))
	}
	return filesBody(files...)
}

func manyEntries(n int, format string) string {
	var b strings.Builder
	for i := range n {
		if i > 0 {
			b.WriteByte(',')
		}
		fmt.Fprintf(&b, format, i)
	}
	return b.String()
}

func TestParseSpecRefuses(t *testing.T) {
	tests := map[string]struct {
		body   string
		code   Code
		fields []string // every field at fault, in order
	}{
		"nothing":              {"", CodeInvalidJSON, nil},
		"white space":          {" \n", CodeInvalidJSON, nil},
		"not JSON":             {"prompt=hi", CodeInvalidJSON, nil},
		"cut off":              {`{"prompt":"hi"`, CodeInvalidJSON, nil},
		"array":                {`[]`, CodeInvalidJSON, nil},
		"string":               {`"hi"`, CodeInvalidJSON, nil},
		"null":                 {`null`, CodeInvalidJSON, nil},
		"trailing data":        {`{"prompt":"hi"} {}`, CodeInvalidJSON, nil},
		"trailing comma":       {`{"prompt":"hi",}`, CodeInvalidJSON, nil},
		"trailing garbage":     {`{"prompt":"hi"}x`, CodeInvalidJSON, nil},
		"comment":              {`{"prompt":"hi"/**/}`, CodeInvalidJSON, nil},
		"byte order mark":      {"\ufeff" + `{"prompt":"hi"}`, CodeInvalidJSON, nil},
		"duplicate key":        {`{"prompt":"hi","prompt":"hi"}`, CodeInvalidJSON, []string{"prompt"}},
		"duplicate escaped":    {`{"prompt":"hi","\u0070rompt":"hi"}`, CodeInvalidJSON, []string{"prompt"}},
		"duplicate in file":    {filesBody(`{"path":"a","path":"b","content":""}`), CodeInvalidJSON, []string{"files[0].path"}},
		"duplicate in unknown": {`{"prompt":"hi","x":[{"a":1,"a":2}]}`, CodeInvalidJSON, []string{"x[0].a"}},
		"duplicate metadata":   {`{"prompt":"hi","metadata":{"k":"1","k":"2"}}`, CodeInvalidJSON, []string{"metadata.k"}},
		"invalid UTF-8":        {"{\"prompt\":\"\xff\"}", CodeInvalidJSON, []string{"prompt"}},
		"lone surrogate":       {`{"prompt":"\ud800"}`, CodeInvalidJSON, []string{"prompt"}},
		"raw control":          {"{\"prompt\":\"a\nb\"}", CodeInvalidJSON, []string{"prompt"}},
		"nested without end":   {`{"x":` + strings.Repeat("[", 20_000), CodeInvalidJSON, []string{"x" + strings.Repeat("[0]", 67) + "..."}},

		"unknown field":         {`{"prompt":"hi","promt":"hi"}`, CodeInvalidRequest, []string{"promt"}},
		"unknown field by case": {`{"Prompt":"hi"}`, CodeInvalidRequest, []string{"Prompt"}},
		"unknown file field":    {filesBody(`{"path":"a","content":"","mode":"x"}`), CodeInvalidRequest, []string{"files[0].mode"}},
		"wrong types, all of them": {`{"prompt":1,"web":"yes","shell":null,"files":{},"connections":[1],"timeout_seconds":"9","max_cost_micros":1.5,
			"zero_data_retention":0,"metadata":[],"model":{}}`, CodeInvalidRequest, []string{"prompt", "web", "shell", "files",
			"connections[0]", "timeout_seconds", "max_cost_micros", "zero_data_retention", "metadata", "model"}},
		"wrong types inside":  {`{"prompt":"x","files":[1,{"path":2,"content":[]}],"metadata":{"a":1}}`, CodeInvalidRequest, []string{"files[0]", "files[0].path", "files[0].content", "files[1].path", "files[1].content", "metadata.a"}},
		"file without fields": {filesBody(`{}`), CodeInvalidRequest, []string{"files[0].path", "files[0].content"}},
		"number too large":    {`{"prompt":"x","timeout_seconds":1e400}`, CodeInvalidRequest, []string{"timeout_seconds"}},

		"neither":                    {`{}`, CodeInvalidRequest, []string{"prompt"}},
		"both":                       {`{"prompt":"a","command":"b"}`, CodeInvalidRequest, []string{"prompt", "command"}},
		"empty prompt":               {`{"prompt":""}`, CodeInvalidRequest, []string{"prompt"}},
		"blank prompt":               {`{"prompt":" \t\n\u00a0\u2003"}`, CodeInvalidRequest, []string{"prompt"}},
		"huge prompt":                {`{"prompt":"` + strings.Repeat("a", maxPrompt+1) + `"}`, CodeInvalidRequest, []string{"prompt"}},
		"empty command":              {`{"command":"  "}`, CodeInvalidRequest, []string{"command"}},
		"huge command":               {`{"command":"` + strings.Repeat("a", maxCommand+1) + `"}`, CodeInvalidRequest, []string{"command"}},
		"NUL in command":             {`{"command":"a\u0000b"}`, CodeInvalidRequest, []string{"command"}},
		"command with model and all": {`{"command":"a","model":"openai/small","web":true,"shell":false,"connections":["billing"]}`, CodeInvalidRequest, []string{"model", "web", "shell", "connections"}},

		"timeout zero":     {`{"prompt":"x","timeout_seconds":0}`, CodeInvalidRequest, []string{"timeout_seconds"}},
		"timeout negative": {`{"prompt":"x","timeout_seconds":-1}`, CodeInvalidRequest, []string{"timeout_seconds"}},
		"timeout large":    {`{"prompt":"x","timeout_seconds":3601}`, CodeInvalidRequest, []string{"timeout_seconds"}},
		"budget zero":      {`{"prompt":"x","max_cost_micros":0}`, CodeInvalidRequest, []string{"max_cost_micros"}},
		"budget large":     {`{"prompt":"x","max_cost_micros":100000001}`, CodeInvalidRequest, []string{"max_cost_micros"}},
		"budget overflow":  {`{"prompt":"x","max_cost_micros":18446744073709551617}`, CodeInvalidRequest, []string{"max_cost_micros"}},

		"unknown model":          {`{"prompt":"x","model":"openai/none"}`, CodeUnknownModel, []string{"model"}},
		"empty model":            {`{"prompt":"x","model":""}`, CodeUnknownModel, []string{"model"}},
		"unknown connection":     {`{"prompt":"x","connections":["billing","none"]}`, CodeUnknownConnection, []string{"connections[1]"}},
		"connection twice":       {`{"prompt":"x","connections":["billing","billing"]}`, CodeInvalidRequest, []string{"connections[1]"}},
		"too many connections":   {`{"prompt":"x","connections":[` + manyEntries(17, `"c%d"`) + `]}`, CodeInvalidRequest, []string{"connections"}},
		"unknown model and more": {`{"prompt":"x","model":"none","timeout_seconds":0}`, CodeInvalidRequest, []string{"timeout_seconds", "model"}},

		"metadata entries": {`{"prompt":"x","metadata":{` + manyEntries(17, `"k%d":""`) + `}}`, CodeInvalidRequest, []string{"metadata"}},
		"metadata key":     {`{"prompt":"x","metadata":{"":""}}`, CodeInvalidRequest, []string{"metadata."}},
		"metadata control": {`{"prompt":"x","metadata":{"a\nb":""}}`, CodeInvalidRequest, []string{`metadata."a\nb"`}},
		"metadata value":   {`{"prompt":"x","metadata":{"k":"` + strings.Repeat("v", 513) + `"}}`, CodeInvalidRequest, []string{"metadata.k"}},

		"path empty":           {pathsBody(""), CodeInvalidRequest, []string{"files[0].path"}},
		"path absolute":        {pathsBody("/etc/passwd"), CodeInvalidRequest, []string{"files[0].path"}},
		"path up":              {pathsBody("../x"), CodeInvalidRequest, []string{"files[0].path"}},
		"path up inside":       {pathsBody("a/../b"), CodeInvalidRequest, []string{"files[0].path"}},
		"path up at the end":   {pathsBody("a/.."), CodeInvalidRequest, []string{"files[0].path"}},
		"path dot":             {pathsBody("."), CodeInvalidRequest, []string{"files[0].path"}},
		"path dot inside":      {pathsBody("a/./b"), CodeInvalidRequest, []string{"files[0].path"}},
		"path double slash":    {pathsBody("a//b"), CodeInvalidRequest, []string{"files[0].path"}},
		"path trailing slash":  {pathsBody("a/"), CodeInvalidRequest, []string{"files[0].path"}},
		"path backslash":       {pathsBody(`..\x`), CodeInvalidRequest, []string{"files[0].path"}},
		"path NUL":             {pathsBody("a\x00b"), CodeInvalidRequest, []string{"files[0].path"}},
		"path newline":         {pathsBody("a\nb"), CodeInvalidRequest, []string{"files[0].path"}},
		"path DEL":             {pathsBody("a\x7f"), CodeInvalidRequest, []string{"files[0].path"}},
		"path long":            {pathsBody(strings.Repeat("a/", 20) + strings.Repeat("b", 480)), CodeInvalidRequest, []string{"files[0].path"}},
		"path part long":       {pathsBody(strings.Repeat("b", 256)), CodeInvalidRequest, []string{"files[0].path"}},
		"path deep":            {pathsBody(strings.Repeat("a/", 32) + "b"), CodeInvalidRequest, []string{"files[0].path"}},
		"path twice":           {pathsBody("a", "b", "a"), CodeInvalidRequest, []string{"files[2].path"}},
		"file then directory":  {pathsBody("a", "a/b"), CodeInvalidRequest, []string{"files[1].path"}},
		"directory then file":  {pathsBody("a/b/c", "a/b"), CodeInvalidRequest, []string{"files[1].path"}},
		"too many files":       {filesBody(manyEntries(101, `{"path":"f%d","content":""}`)), CodeInvalidRequest, []string{"files"}},
		"files too large":      {filesBody(`{"path":"a","content":"`+strings.Repeat("a", 5<<20)+`"}`, `{"path":"b","content":"`+strings.Repeat("a", 3<<20+1)+`"}`), CodeInvalidRequest, []string{"files"}},
		"base64 alphabet":      {filesBody(`{"path":"a","content":"a-_=","encoding":"base64"}`), CodeInvalidRequest, []string{"files[0].content"}},
		"base64 padding":       {filesBody(`{"path":"a","content":"AAE","encoding":"base64"}`), CodeInvalidRequest, []string{"files[0].content"}},
		"base64 trailing bits": {filesBody(`{"path":"a","content":"AAF=","encoding":"base64"}`), CodeInvalidRequest, []string{"files[0].content"}},
		"base64 line break":    {filesBody(`{"path":"a","content":"AA\nE=","encoding":"base64"}`), CodeInvalidRequest, []string{"files[0].content"}},
		"encoding":             {filesBody(`{"path":"a","content":"","encoding":"hex"}`), CodeInvalidRequest, []string{"files[0].encoding"}},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			_, err := parseSpec([]byte(tt.body), testRules)
			var p *Problem
			if !errors.As(err, &p) {
				t.Fatalf("accepted or failed oddly: %v", err)
			}
			if p.Code != tt.code {
				t.Errorf("code %s, want %s (%+v)", p.Code, tt.code, p)
			}
			var fields []string
			for _, f := range p.Errors {
				fields = append(fields, f.Field)
				if f.Detail == "" {
					t.Errorf("field %q without detail", f.Field)
				}
			}
			if d := cmp.Diff(tt.fields, fields); d != "" {
				t.Errorf("fields: %s\n%+v", d, p)
			}
		})
	}
}

func TestParseSpecAcceptsTheLimits(t *testing.T) {
	tests := map[string]string{
		"prompt":      `{"prompt":"` + strings.Repeat("a", maxPrompt) + `"}`,
		"command":     `{"command":"` + strings.Repeat("a", maxCommand) + `"}`,
		"files":       filesBody(manyEntries(100, `{"path":"f%d","content":""}`)),
		"file bytes":  filesBody(`{"path":"a","content":"` + strings.Repeat("a", 8<<20) + `"}`),
		"path":        pathsBody(strings.Repeat("d/", 31)+strings.Repeat("b", 255), strings.Repeat("c", 255)+"/"+strings.Repeat("c", 255)),
		"odd paths":   pathsBody("...", ".hidden", "a b", "-rf", "~", "$(x)", "é", "日本", "a/...", "*"),
		"siblings":    pathsBody("a/b", "a/c", "a.b", "ab"),
		"connections": `{"prompt":"x","connections":["crm"]}`,
		"metadata":    `{"prompt":"x","metadata":{` + manyEntries(16, `"k%d":"`+strings.Repeat("v", 512)+`"`) + `}}`,
		"numbers":     `{"prompt":"x","timeout_seconds":1,"max_cost_micros":1}`,
	}
	for name, body := range tests {
		t.Run(name, func(t *testing.T) {
			if _, err := parseSpec([]byte(body), testRules); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestProblemsNeverGrow(t *testing.T) {
	bodies := map[string]string{
		"unknown fields": `{` + manyEntries(5000, `"f%d":0`) + `}`,
		"bad paths":      pathsBody(strings.Split(strings.Repeat("/,", 99)+"/", ",")...),
		"long name":      `{"` + strings.Repeat("é", 100_000) + `":1}`,
		"long model":     `{"prompt":"x","model":"` + strings.Repeat("m", 100_000) + `"}`,
		"long duplicate": `{"` + strings.Repeat("é", 100_000) + `":1,"` + strings.Repeat("é", 100_000) + `":1}`,
	}
	for name, body := range bodies {
		t.Run(name, func(t *testing.T) {
			_, err := parseSpec([]byte(body), testRules)
			b, jsonErr := json.Marshal(err)
			if err == nil || jsonErr != nil || len(b) > 8<<10 {
				t.Errorf("%d bytes, %v, %v", len(b), err != nil, jsonErr)
			}
		})
	}
}

func TestFingerprint(t *testing.T) {
	print := func(body string) string {
		t.Helper()
		spec, err := parseSpec([]byte(body), testRules)
		if err != nil {
			t.Fatal(err)
		}
		f, _, err := fingerprint(spec)
		if err != nil || len(f) != 64 {
			t.Fatalf("%q, %v", f, err)
		}
		return f
	}
	same := []string{
		`{"prompt":"a<b","metadata":{"x":"1","y":"2"}}`,
		"\n{ \"metadata\" : {\"y\":\"2\",\"x\":\"1\"},\t\"prompt\":\"a\\u003cb\"}",
		`{"prompt":"a<b","metadata":{"x":"1","y":"2"},"files":[],"connections":[],"shell":true,"web":false,"model":"replay/proof",
			"timeout_seconds":120.0,"max_cost_micros":4e4,"zero_data_retention":false}`,
	}
	for _, body := range same[1:] {
		if print(body) != print(same[0]) {
			t.Errorf("differs from the first: %s", body)
		}
	}
	seen := map[string]string{}
	for _, body := range []string{
		same[0], `{"prompt":"a<b "}`, `{"prompt":"a<b"}`, `{"command":"a<b"}`, `{"prompt":"a<b","web":true}`, `{"prompt":"a<b","timeout_seconds":121}`,
		pathsBody("a", "b"), pathsBody("ab"), filesBody(`{"path":"a","content":"AAE="}`), filesBody(`{"path":"a","content":"AAE=","encoding":"base64"}`),
	} {
		f := print(body)
		if other, ok := seen[f]; ok {
			t.Errorf("same fingerprint: %s and %s", body, other)
		}
		seen[f] = body
	}
}

// reparse writes an accepted spec as JSON and reads it again: the canonical form means the same request.
func reparse(spec run.Spec, r rules) error {
	spec.Files = slices.Clone(spec.Files)
	for i, f := range spec.Files {
		if f.Content == "" && f.Upload == "" { // a record does not say that a file is empty; a request must
			spec.Files[i].Content = "AAAA" // as text and as base64
		}
	}
	b, err := json.Marshal(spec)
	if err != nil {
		return err
	}
	if _, canonical, err := fingerprint(spec); err != nil || len(spec.Files) == 0 && canonical != string(b) {
		return fmt.Errorf("canonical form is not JSON's: %w\n%.500s\n%.500s", err, canonical, b)
	}
	again, err := parseSpec(b, r)
	if err != nil {
		return fmt.Errorf("canonical form is refused: %w\n%.500s", err, b)
	}
	if d := cmp.Diff(spec, again); d != "" {
		return fmt.Errorf("canonical form means something else: %s", d)
	}
	return nil
}

func FuzzParseSpec(f *testing.F) {
	for _, seed := range []string{
		`{"prompt":"hi","model":"openai/small","web":true,"connections":["billing"],"metadata":{"a":"b"}}`,
		`{"command":"ls","files":[{"path":"a/b","content":"AAE=","encoding":"base64"}],"timeout_seconds":1e2}`,
		`{"prompt":"\ud83d\ude00 \u2028\u2029 \u0000\u0007\b\f\u007f <&> \"\\/","metadata":{"b<":"2","a":"\u2028"}}`,
		`{"command":"ls","files":[{"path":"empty","content":""},{"path":"up","upload":"upl_0123456789abcdef0123456789abcdef"}]}`,
		`{"command":"ls","files":[{"path":"up","upload":"0"}]}`,
		`{"prompt":"\ud83d\ude00","prompt":"x"}`, `{"files":[[[{}]]],"x":{"a":1,"a":2}}`, "\xff", `{"a":`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		spec, err := parseSpec(body, testRules)
		if err != nil {
			var p *Problem
			if !errors.As(err, &p) || p.Status != 400 && p.Code != CodeUnknownUpload || len(p.Errors) > maxFieldErrors {
				t.Fatalf("not a fitting problem: %v", err)
			}
			return
		}
		if err := reparse(spec, testRules); err != nil {
			t.Fatal(err)
		}
	})
}

// TestPathsAgainstModel compares the path rules with a plain model of a file system.
func TestPathsAgainstModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		paths := rapid.SliceOfN(rapid.StringMatching(`[ab]{1,2}(/[ab]){0,3}`), 1, 8).Draw(t, "paths")
		tree := pathTree{files: map[string]bool{}, dirs: map[string]bool{}}
		var taken []string
		for _, p := range paths {
			collides := false
			for _, q := range taken {
				collides = collides || p == q || strings.HasPrefix(p, q+"/") || strings.HasPrefix(q, p+"/")
			}
			why := tree.add(p)
			if (why != "") != collides {
				t.Fatalf("%q after %q: %q, collides %v", p, taken, why, collides)
			}
			if why == "" {
				taken = append(taken, p)
			}
		}
	})
}

// TestExposedBroker: a command whose programs reach the broker may have what a prompt may have, and a model by default.
func TestExposedBroker(t *testing.T) {
	got, err := parseSpec([]byte(`{"command":"x","expose_broker":true}`), testRules)
	want := run.Spec{Command: "x", Model: "replay/proof", Shell: true, ExposeBroker: true, TimeoutSeconds: 120, MaxCostMicros: 40_000}
	if d := cmp.Diff(want, got); d != "" || err != nil {
		t.Error(d, err)
	}
	got, err = parseSpec([]byte(`{"command":"x","expose_broker":true,"model":"openai/small","web":true,"connections":["crm"]}`), testRules)
	want = run.Spec{Command: "x", Model: "openai/small", Web: true, Connections: []string{"crm"}, Shell: true, ExposeBroker: true, TimeoutSeconds: 120, MaxCostMicros: 40_000}
	if d := cmp.Diff(want, got); d != "" || err != nil {
		t.Error(d, err)
	}
	for body, field := range map[string]string{
		`{"command":"x","expose_broker":true,"model":"nobody/none"}`:   "model",
		`{"command":"x","expose_broker":true,"connections":["none"]}`:  "connections[0]",
		`{"command":"x","expose_broker":true,"shell":false}`:           "shell",
		`{"command":"x","expose_broker":"yes"}`:                        "expose_broker",
		`{"command":"x","expose_broker":false,"model":"openai/small"}`: "model",
	} {
		var p *Problem
		if _, err := parseSpec([]byte(body), testRules); !errors.As(err, &p) || len(p.Errors) != 1 || p.Errors[0].Field != field {
			t.Errorf("%s: %+v", body, p)
		}
	}
}
