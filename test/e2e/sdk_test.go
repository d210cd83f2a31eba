package e2e

import (
	"encoding/base64"
	"os"
	"path/filepath"
	"testing"

	"github.com/ephemeral-run/ephemeral/client"
	"github.com/ephemeral-run/ephemeral/run"
)

// TestOpenAISDK: the OpenAI SDK for Python, unchanged, works in a machine through the local door. Its wheels, for the
// machine's Python, come from the directory that EPHEMERAL_TEST_WHEELS names; scripts/test-sdk gets them from PyPI.
func TestOpenAISDK(t *testing.T) {
	dir := os.Getenv("EPHEMERAL_TEST_WHEELS")
	if dir == "" {
		t.Skip("EPHEMERAL_TEST_WHEELS names no wheels of the SDK: make test-sdk does")
	}
	wheels, err := filepath.Glob(filepath.Join(dir, "*.whl"))
	if err != nil || len(wheels) == 0 {
		t.Fatalf("no wheels in %s: %v", dir, err)
	}
	script, err := os.ReadFile("testdata/openai_sdk.py")
	if err != nil {
		t.Fatal(err)
	}
	files := []run.File{{Path: "use.py", Content: string(script)}}
	for _, w := range wheels {
		data, err := os.ReadFile(w)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, run.File{Path: "wheels/" + filepath.Base(w), Content: base64.StdEncoding.EncodeToString(data), Encoding: "base64"})
	}
	n := shared.tenant(t, 1_000_000)
	r := n.finish(t, client.Request{
		Command:      `for w in wheels/*.whl; do python3 -m zipfile -e "$w" lib || exit; done; PYTHONPATH=lib python3 use.py`,
		ExposeBroker: true, Model: "replay/door", TimeoutSeconds: 80, Files: files,
	})
	if r.State != run.Succeeded || r.Result == nil || r.Result.Stdout == nil {
		t.Fatalf("ended %s, error %+v, result %+v", r.State, r.Error, r.Result)
	}
	want := `['replay/door']
whole ['shell'] None tool_calls 110
streamed ['shell'] None tool_calls 110 True
whole [] a word for a program stop 15
streamed [] a word for a program stop 15 True
403 model_not_allowed
`
	if got := r.Result.Stdout.Content; got != want {
		t.Errorf("the SDK saw\n%s\nwant\n%s\nstandard error: %s", got, want, r.Result.Stderr.Content)
	}
	checkMoney(t, r, r.Money.Reserved)
	if r.Usage.ModelCalls != 4 || r.Usage.TotalTokens != 250 {
		t.Errorf("usage %+v, want 4 calls of 250 tokens", r.Usage)
	}
}
