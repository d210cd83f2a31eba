package gateway

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestAPIPage holds docs/api.md against the routes: each is called in it, and nothing else. The calls themselves are made
// by the end-to-end tests.
func TestAPIPage(t *testing.T) {
	page, err := os.ReadFile("../docs/api.md")
	if err != nil {
		t.Fatal(err)
	}
	s := New(Config{}, Deps{Store: &fakeStore{}})
	defer s.stop()
	named := regexp.MustCompile(`:\w+`)
	var routes, called []string
	var match []*regexp.Regexp
	for _, r := range s.publicRoutes() {
		if r.method != "HEAD" {
			routes = append(routes, r.method+" "+r.path)
			match = append(match, regexp.MustCompile("^"+r.method+" "+strings.ReplaceAll(named.ReplaceAllString(r.path, `[^ /]+`), "*", ".+")+"$"))
		}
	}
	call, method := regexp.MustCompile(`(?:api|admin|curl) .*"\$EPHEMERAL_URL([^"?]*)`), regexp.MustCompile(`-X (\w+)`)
	text := strings.ReplaceAll(string(page), "\\\n", " ")
	for line := range strings.Lines(text) {
		address := call.FindStringSubmatch(line)
		if address == nil {
			continue
		}
		verb := "GET"
		if m := method.FindStringSubmatch(line); m != nil {
			verb = m[1]
		} else if strings.Contains(line, "-H \"$json\"") {
			verb = "POST"
		}
		path := strings.NewReplacer("$(jq -r .id <<<", "x").Replace(address[1])
		at := slices.IndexFunc(match, func(re *regexp.Regexp) bool { return re.MatchString(verb + " " + path) })
		if at < 0 {
			t.Errorf("no route for %s %s", verb, path)
			continue
		}
		called = append(called, routes[at])
	}
	slices.Sort(called)
	slices.Sort(routes)
	if d := cmp.Diff(routes, slices.Compact(called)); d != "" {
		t.Errorf("docs/api.md does not call each route (-routes +called):\n%s", d)
	}
}
