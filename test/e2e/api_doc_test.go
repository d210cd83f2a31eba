package e2e

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/ephemeral-run/ephemeral/client"
)

// TestAPIPage runs every command of docs/api.md, in its order and in one shell, against the server.
func TestAPIPage(t *testing.T) {
	if _, err := exec.LookPath("jq"); err != nil {
		t.Fatalf("the page reads answers with jq (scripts/setup installs it): %v", err)
	}
	page, err := os.ReadFile("../../docs/api.md")
	if err != nil {
		t.Fatal(err)
	}
	script := "set -euo pipefail\nset -x\n"
	for _, block := range regexp.MustCompile("(?s)```sh\n(.*?)```").FindAllStringSubmatch(string(page), -1) {
		script += block[1]
	}
	m := shared.tenant(t, 10_000_000)
	var admin client.NewKey
	shared.json(t, &admin, "keys", "create", "--admin")
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	bash := exec.CommandContext(ctx, "bash", "-c", script)
	bash.Env = append(os.Environ(), "EPHEMERAL_URL=http://"+shared.listen, "EPHEMERAL_API_KEY="+m.key, "ADMIN_KEY="+admin.Secret)
	out, err := bash.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for _, want := range []string{`"state":"succeeded"`, "event: worker.destroyed", "\nhello\n", `"alive":true`, "openapi: 3.1", fmt.Sprintf("%q", "Ada")} {
		if !strings.Contains(string(out), want) {
			t.Errorf("no %s in what the commands printed:\n%s", want, out)
		}
	}
}
