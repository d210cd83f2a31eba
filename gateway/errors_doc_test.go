package gateway

import (
	"fmt"
	"net/http"
	"os"
	"strings"
	"testing"
)

// errorsPage is what docs/errors.md must say.
func errorsPage() string {
	var b strings.Builder
	b.WriteString(`# Errors

Every refusal of the API is a problem document ([RFC 9457](https://www.rfc-editor.org/rfc/rfc9457)) of the media type
` + "`application/problem+json`" + `:

` + "```json" + `
{
  "type": "https://github.com/ephemeral-run/ephemeral/blob/main/docs/errors.md#invalid_request",
  "title": "The request has invalid fields",
  "status": 400,
  "detail": "The request has invalid fields.",
  "code": "invalid_request",
  "errors": [{"field": "files[0].path", "detail": "must be relative"}],
  "remediation": "Correct the fields listed in errors and send the request again.",
  "request_id": "A3BQDJ3FWYO7BJHTLLMUFAM6BQ"
}
` + "```" + `

Decide on ` + "`code`" + `, which is stable; ` + "`title`, `detail` and `remediation`" + ` are for people and may change. ` + "`errors`" + ` names every field at
fault. Quote ` + "`request_id`" + ` when you ask the operator. Where the same request may succeed later, ` + "`Retry-After`" + ` says after how many
seconds: the number named below or, for a full queue and for machines that cannot be made, an estimate where there is one.

This page is made from the code.

`)
	for _, e := range Catalogue {
		retry := ""
		if e.RetryAfter > 0 {
			retry = fmt.Sprintf(" `Retry-After` is %d seconds.", e.RetryAfter)
		}
		fmt.Fprintf(&b, "## %s\n\n%d %s. %s. %s%s\n\n", e.Code, e.Status, http.StatusText(e.Status), e.Title, e.Remediation, retry)
	}
	return strings.TrimSuffix(b.String(), "\n")
}

// TestErrorsPage keeps the page equal to the catalogue. With EPHEMERAL_UPDATE_DOCS=1 it writes the page.
func TestErrorsPage(t *testing.T) {
	const path = "../docs/errors.md"
	want := errorsPage()
	if os.Getenv("EPHEMERAL_UPDATE_DOCS") == "1" {
		if err := os.WriteFile(path, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if string(got) != want {
		t.Errorf("%s does not say what the catalogue says: run EPHEMERAL_UPDATE_DOCS=1 go test ./gateway -run ErrorsPage", path)
	}
}
