package gateway

import (
	"compress/gzip"
	"encoding/json"
	"io"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/ephemeral-run/ephemeral/gateway/web"
)

// look asks for a page or asset as a browser does.
func look(t *testing.T, s *served, path string, header map[string]string) (*http.Response, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, s.url+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Accept-Encoding", "identity")
	for k, v := range header {
		req.Header.Set(k, v)
	}
	transport := &http.Transport{DisableKeepAlives: true} // pages are no part of the API's description
	resp, err := transport.RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp, string(body)
}

func TestPages(t *testing.T) {
	s := serve(t, Config{}, Deps{Store: &fakeStore{}})
	for _, path := range []string{"/", "/runs/run_0123456789abcdef0123456789abcdef", "/shared", "/ops"} {
		resp, body := look(t, s, path, nil)
		if resp.StatusCode != 200 || !strings.HasPrefix(body, "<!doctype html>") || resp.Header.Get("Content-Type") != "text/html; charset=utf-8" {
			t.Fatalf("%s: %d %v", path, resp.StatusCode, resp.Header)
		}
		policy := resp.Header.Get("Content-Security-Policy")
		for _, want := range []string{"default-src 'none'", "script-src 'self'", "style-src 'self'", "frame-ancestors 'none'", "form-action 'none'", "require-trusted-types-for 'script'"} {
			if !strings.Contains(policy, want) {
				t.Errorf("%s: policy lacks %s: %s", path, want, policy)
			}
		}
		if strings.Contains(policy, "unsafe") || resp.Header.Get("X-Content-Type-Options") != "nosniff" || resp.Header.Get("Referrer-Policy") != "no-referrer" {
			t.Errorf("%s: %v", path, resp.Header)
		}
		inline := regexp.MustCompile(`(?i)<script(?:[^>]*)>[^<]|<style|\sstyle=|\son\w+=|javascript:`)
		if found := inline.FindString(body); found != "" {
			t.Errorf("%s: inline: %s", path, found)
		}
		for _, m := range regexp.MustCompile(`(?:src|href)="([^"]*)"`).FindAllStringSubmatch(body, -1) {
			if !strings.HasPrefix(m[1], "/") && !strings.HasPrefix(m[1], "#") || strings.HasPrefix(m[1], "//") {
				t.Errorf("%s: loads from elsewhere: %s", path, m[1])
			}
			if strings.HasPrefix(m[1], web.AssetPrefix) {
				if asset, _ := look(t, s, m[1], nil); asset.StatusCode != 200 || !strings.Contains(asset.Header.Get("Cache-Control"), "immutable") {
					t.Errorf("%s: %d %v", m[1], asset.StatusCode, asset.Header)
				}
			}
		}
	}
}

func TestPageLanguage(t *testing.T) {
	s := serve(t, Config{}, Deps{Store: &fakeStore{}})
	for _, c := range []struct {
		header map[string]string
		want   string
	}{
		{nil, "en"},
		{map[string]string{"Accept-Language": "de-CH,de;q=0.9"}, "de"},
		{map[string]string{"Accept-Language": "de", "Cookie": "language=ja"}, "ja"},
		{map[string]string{"Accept-Language": "ko", "Cookie": `language="><script>`}, "ko"},
	} {
		resp, body := look(t, s, "/", c.header)
		if !strings.Contains(body, `<html lang="`+c.want+`"`) || !strings.Contains(resp.Header.Get("Vary"), "Accept-Language") {
			t.Errorf("%v: want %s, Vary %q:\n%.200s", c.header, c.want, resp.Header.Get("Vary"), body)
		}
	}
}

func TestSiteCaching(t *testing.T) {
	s := serve(t, Config{}, Deps{Store: &fakeStore{}})
	_, page := look(t, s, "/", nil)
	style := regexp.MustCompile(web.AssetPrefix + `\w+/style\.css`).FindString(page)
	plain, body := look(t, s, style, nil)
	tag := plain.Header.Get("ETag")
	if again, rest := look(t, s, style, map[string]string{"If-None-Match": `"x", W/` + tag}); again.StatusCode != http.StatusNotModified || rest != "" {
		t.Errorf("with its tag: %d, %d bytes", again.StatusCode, len(rest))
	}
	if other, _ := look(t, s, style, map[string]string{"If-None-Match": `"x"`}); other.StatusCode != 200 {
		t.Errorf("with another tag: %d", other.StatusCode)
	}
	packed, raw := look(t, s, style, map[string]string{"Accept-Encoding": "br;q=1, gzip"})
	if packed.Header.Get("Content-Encoding") != "gzip" || len(raw) >= len(body) {
		t.Fatalf("compressed: %v, %d of %d bytes", packed.Header, len(raw), len(body))
	}
	z, err := gzip.NewReader(strings.NewReader(raw))
	if err != nil {
		t.Fatal(err)
	}
	if unpacked, err := io.ReadAll(z); err != nil || string(unpacked) != body {
		t.Errorf("unpacked is another file: %v", err)
	}
	for _, path := range []string{web.AssetPrefix, web.AssetPrefix + "0000000000000000/style.css", style + "x", strings.Replace(style, "style.css", "../web.go", 1), strings.Replace(style, "style.css", "%2e%2e/web.go", 1)} {
		if resp, body := look(t, s, path, nil); resp.StatusCode != http.StatusNotFound || resp.Header.Get("Cache-Control") != "no-store" {
			t.Errorf("%s: %d %v %.80s", path, resp.StatusCode, resp.Header, body)
		}
	}
}

// What a refusal means is said in every language.
func TestProblemsHaveTexts(t *testing.T) {
	b, err := os.ReadFile("web/i18n/en.json")
	if err != nil {
		t.Fatal(err)
	}
	var texts map[string]any
	if err := json.Unmarshal(b, &texts); err != nil {
		t.Fatal(err)
	}
	for _, e := range Catalogue {
		if texts["problem."+string(e.Code)] == nil {
			t.Errorf("gateway/web/i18n has no text problem.%s", e.Code)
		}
	}
}

// TestDetailsHaveTexts: what the playground's form can get wrong is said at its field in the language of the page, so the page
// has to know the API's words for it.
func TestDetailsHaveTexts(t *testing.T) {
	b, err := os.ReadFile("web/assets/js/details.js")
	if err != nil {
		t.Fatal(err)
	}
	var known []*regexp.Regexp
	for _, m := range regexp.MustCompile(`(?m)^  \[/(.+)/, 'detail\.`).FindAllStringSubmatch(string(b), -1) {
		known = append(known, regexp.MustCompile(m[1]))
	}
	l := newLive(t, Config{})
	m := l.newMember("o", 1_000)
	used := map[*regexp.Regexp]bool{}
	for _, body := range []string{
		`{}`, `{"prompt": " ", "timeout_seconds": 4000, "max_cost_micros": 0}`, `{"prompt": "x", "timeout_seconds": 1.5, "max_cost_micros": null}`,
		`{"prompt": "x", "model": "nobody/nothing", "connections": ["none", "none"]}`, `{"command": "a\u0000b"}`, `{"command": "true", "max_cost_micros": 1}`,
		`{"command": "true", "max_cost_micros": 5000}`, `{"prompt": "` + strings.Repeat("x", maxPrompt+1) + `"}`,
		`{"command": "true", "files": [{"path": "", "content": ""}, {"path": "/a", "content": ""}, {"path": "../a", "content": ""}, {"path": "a//b", "content": ""},
			{"path": "a\\b", "content": ""}, {"path": "a\nb", "content": ""}, {"path": "c", "content": ""}, {"path": "c", "content": ""}, {"path": "c/d", "content": ""},
			{"path": "e/f", "content": ""}, {"path": "e", "content": ""}, {"path": "g", "encoding": "base64", "content": "!"}, {"path": "` +
			strings.Repeat("d/", maxPathDepth+1) + `x", "content": ""}, {"path": "` + strings.Repeat("x", maxPathPart+1) + `", "content": ""}]}`,
	} {
		p := l.do(t, "POST", "/v1/runs", body, "Authorization", "Bearer "+m.secret).problem(t)
		if len(p.Errors) == 0 {
			t.Errorf("%.60s: %+v", body, p)
		}
		for _, e := range p.Errors {
			i := slices.IndexFunc(known, func(r *regexp.Regexp) bool { return r.MatchString(e.Detail) })
			if i < 0 {
				t.Errorf("details.js does not know %q, of %s", e.Detail, e.Field)
				continue
			}
			used[known[i]] = true
		}
	}
	for _, r := range known {
		if name, model := "must have 1", "no default model"; !used[r] && !strings.Contains(r.String(), name) && !strings.Contains(r.String(), model) {
			t.Errorf("nothing gives what details.js knows: %s", r)
		}
	}
}
