package gateway

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/ephemeral-run/ephemeral/client"
	"github.com/ephemeral-run/ephemeral/run"
)

// left runs a run that leaves the files.
func (l *live) left(m member, files map[string][]byte) run.Run {
	l.t.Helper()
	l.create(m)
	lease := l.take()
	l.start(lease)
	w := l.store.Artifacts(lease)
	var total int64
	for name, content := range files {
		l.must(w.Begin(name, 0o644))
		for rest := content; len(rest) > 0; {
			n := min(len(rest), 1<<20)
			l.must(w.Write(l.ctx, rest[:n]))
			rest = rest[n:]
		}
		total += int64(len(content))
	}
	_, err := w.Commit(l.ctx)
	l.must(err)
	r, err := l.store.Settle(l.ctx, lease, run.Outcome{At: time.Now(), State: run.Succeeded, Files: &run.Files{Count: len(files), Bytes: total}})
	l.must(err)
	return r
}

var oddFiles = map[string][]byte{
	"empty": {}, "nul": {0}, "a.csv": []byte("a,b\n"), "page.html": []byte("<script>alert(1)</script>"), "i.SVG": []byte("<svg/>"),
	"a/b/c": []byte("nested"), "ü é.txt": []byte("x"), `"quoted"; filename="evil`: []byte("q"), "line\r\nSet-Cookie: a=b": []byte("l"),
	`back\slash`: []byte("b"), "%2e%2e%2fx": []byte("p"), "?a=b#c": []byte("u"), "日本.png": []byte("j"), "…": []byte("…"),
	"big": bytes.Repeat([]byte("0123456789\x00"), 300_000),
}

func TestFilesOfARun(t *testing.T) {
	l := newLive(t, Config{})
	m := l.newMember("org_files", 1_000_000)
	r := l.left(m, oddFiles)
	list, err := m.Files(l.ctx, r.ID)
	l.must(err)
	if len(list) != len(oddFiles) {
		t.Fatalf("%d files", len(list))
	}
	for _, a := range list {
		var got bytes.Buffer
		l.must(m.Download(l.ctx, r.ID, a, &got))
		if !bytes.Equal(got.Bytes(), oddFiles[a.Path]) {
			t.Errorf("%q differs", a.Path)
		}
	}
	dir := t.TempDir()
	_, err = m.DownloadAll(l.ctx, r.ID, dir)
	l.must(err)
	for name, content := range oddFiles {
		if got, err := os.ReadFile(filepath.Join(dir, name)); err != nil || !bytes.Equal(got, content) {
			t.Errorf("%q: %v", name, err)
		}
	}
	other := l.newMember("org_other", 0)
	var p *client.Problem
	if _, err := other.Files(l.ctx, r.ID); !errors.As(err, &p) || p.Status != 404 {
		t.Errorf("another organisation's list: %v", err)
	}
	if err := other.Download(l.ctx, r.ID, list[0], io.Discard); !errors.As(err, &p) || p.Status != 404 {
		t.Errorf("another organisation's file: %v", err)
	}
	if err := m.Download(l.ctx, r.ID, run.Artifact{Path: "nothing"}, io.Discard); !errors.As(err, &p) || p.Status != 404 {
		t.Errorf("no file: %v", err)
	}
	wrong := list[0]
	wrong.SHA256 = strings.Repeat("0", 64)
	if err := m.Download(l.ctx, r.ID, wrong, io.Discard); !errors.Is(err, client.ErrChecksum) {
		t.Errorf("another checksum: %v", err)
	}
	l.must(m.Delete(l.ctx, r.ID))
	if list, err := m.Files(l.ctx, r.ID); err != nil || len(list) != 0 {
		t.Errorf("after deletion: %v, %v", list, err)
	}
}

func TestFileHeaders(t *testing.T) {
	l := newLive(t, Config{})
	m := l.newMember("org_headers", 1_000_000)
	r := l.left(m, oddFiles)
	get := func(method, path string, header ...string) answer {
		return l.do(t, method, "/v1/runs/"+string(r.ID)+"/files/"+path, "", append([]string{"Authorization", "Bearer " + m.secret}, header...)...)
	}
	for path, want := range map[string]struct{ contentType, disposition string }{
		"a.csv":                           {"text/csv; charset=utf-8", `attachment; filename="a.csv"`},
		"page.html":                       {"application/octet-stream", `attachment; filename="page.html"`},
		"i.SVG":                           {"application/octet-stream", `attachment; filename="i.SVG"`},
		"a%2Fb%2fc":                       {"application/octet-stream", `attachment; filename="c"`},
		"%C3%BC%20%C3%A9.txt":             {"text/plain; charset=utf-8", `attachment; filename="_ _.txt"; filename*=UTF-8''%C3%BC%20%C3%A9.txt`},
		"line%0D%0ASet-Cookie:%20a=b":     {"application/octet-stream", `attachment; filename="line__Set-Cookie: a=b"; filename*=UTF-8''line%0D%0ASet-Cookie%3A%20a%3Db`},
		"%22quoted%22%3B+filename=%22evi": {"", ""},
		"empty":                           {"application/octet-stream", `attachment; filename="empty"`},
	} {
		for _, method := range []string{"GET", "HEAD"} {
			a := get(method, path)
			if want.disposition == "" {
				if a.StatusCode != 404 {
					t.Errorf("%s: %d", path, a.StatusCode)
				}
				continue
			}
			if a.StatusCode != 200 || a.Header.Get("Content-Type") != want.contentType || a.Header.Get("Content-Disposition") != want.disposition {
				t.Errorf("%s %s: %d %q %q", method, path, a.StatusCode, a.Header.Get("Content-Type"), a.Header.Get("Content-Disposition"))
			}
			for name, value := range map[string]string{"X-Content-Type-Options": "nosniff", "Content-Security-Policy": "default-src 'none'; sandbox", "Cache-Control": "no-store", "Set-Cookie": ""} {
				if a.Header.Get(name) != value {
					t.Errorf("%s %s: %s is %q", method, path, name, a.Header.Get(name))
				}
			}
			name, _ := url.PathUnescape(path)
			if a.ContentLength != int64(len(oddFiles[name])) || method == "GET" && a.body != string(oddFiles[name]) {
				t.Errorf("%s %s: %d bytes of %d", method, path, a.ContentLength, len(oddFiles[name]))
			}
			if a := get(method, path, "If-None-Match", a.Header.Get("ETag")); a.StatusCode != http.StatusNotModified || a.body != "" {
				t.Errorf("%s %s again: %d", method, path, a.StatusCode)
			}
		}
	}
	for path, want := range map[string]int{"": 404, "a.csv/": 404, "../events": 404, "..%2fevents": 404} {
		if a := get("GET", path); a.StatusCode != want {
			t.Errorf("%q: %d, want %d", path, a.StatusCode, want)
		}
	}
}

// TestFilePathsAsTheyAre: slashes need no encoding, and what is badly encoded is refused.
func TestFilePathsAsTheyAre(t *testing.T) {
	l := newLive(t, Config{})
	m := l.newMember("org_paths", 1_000_000)
	r := l.left(m, oddFiles)
	for path, want := range map[string]string{"a/b/c": "HTTP/1.1 200", "a%2Fb/c": "HTTP/1.1 200", "%zz": "HTTP/1.1 400", "a/b": "HTTP/1.1 404"} {
		conn, err := net.Dial("tcp", l.addr)
		l.must(err)
		_, err = fmt.Fprintf(conn, "GET /v1/runs/%s/files/%s HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\nConnection: close\r\n\r\n", r.ID, path, m.secret)
		l.must(err)
		got, err := io.ReadAll(conn)
		if err != nil || !strings.HasPrefix(string(got), want) {
			t.Errorf("%s: %.40q, %v", path, got, err)
		}
		l.must(conn.Close())
	}
}

// TestDispositionProperty: whatever a file is called, the header is one line of visible ASCII with one name in quotes.
func TestDispositionProperty(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		h := attachment(rapid.String().Draw(t, "name"))
		for i := range len(h) {
			if h[i] < ' ' || h[i] > '~' {
				t.Fatalf("byte %#x in %q", h[i], h)
			}
		}
		if strings.Count(h, `"`) != 2 || strings.Count(h, ";") > 2 {
			t.Fatalf("%q", h)
		}
	})
}

// TestFilesTakeBoundedMemory has 40 clients download 16 MiB at once, and stop reading in the middle: what the gateway holds then
// is what it holds of all of them. Then each reads the rest.
func TestFilesTakeBoundedMemory(t *testing.T) {
	const clients = 40
	l := newLive(t, Config{WriteTimeout: time.Minute})
	m := l.newMember("org_memory", 1_000_000)
	content := bytes.Repeat([]byte("0123456789abcdef"), 1<<20)
	r := l.left(m, map[string][]byte{"big": content})
	want := sha256.Sum256(content)
	content = nil
	before := settledHeap(t)
	var answers [clients]*http.Response
	for i := range answers {
		req, err := http.NewRequestWithContext(l.ctx, http.MethodGet, l.url+"/v1/runs/"+string(r.ID)+"/files/big", nil)
		l.must(err)
		req.Header.Set("Authorization", "Bearer "+m.secret)
		answers[i], err = (&http.Transport{DisableKeepAlives: true}).RoundTrip(req)
		l.must(err)
		defer answers[i].Body.Close()
	}
	if grown := settledHeap(t) - before; grown > clients*(2<<20) {
		t.Errorf("the heap grew by %d MiB", grown>>20)
	} else {
		t.Logf("the heap grew by %.1f MiB", float64(grown)/(1<<20))
	}
	for _, a := range answers {
		got := sha256.New()
		if n, err := io.Copy(got, a.Body); err != nil || !bytes.Equal(got.Sum(nil), want[:]) {
			t.Errorf("%d bytes, %v", n, err)
		}
	}
}

// TestFileCutShort: when the store fails in the middle, the client sees that it does not have all.
func TestFileCutShort(t *testing.T) {
	calls := 0
	s := serve(t, Config{}, Deps{Store: &cutStore{calls: &calls}})
	req, err := http.NewRequest("GET", s.url+"/v1/runs/run_00000000000000000000000000000001/files/a", nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+memberSecret)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	n, err := io.Copy(io.Discard, resp.Body)
	if err == nil || n >= 1<<20 {
		t.Errorf("%d bytes, %v", n, err)
	}
	http.DefaultClient.CloseIdleConnections()
}

type cutStore struct {
	fakeStore
	calls *int
}

func (c *cutStore) ListArtifacts(_ context.Context, _ string, _ run.ID) ([]run.Artifact, error) {
	return []run.Artifact{{Path: "a", Size: 1 << 20, SHA256: strings.Repeat("0", 64), Mode: "0644"}}, nil
}

func (c *cutStore) ReadArtifact(_ context.Context, _ run.ID, _ run.Artifact, _ int64, n int) ([]byte, error) {
	if *c.calls++; *c.calls == 3 {
		return nil, run.ErrUnavailable
	}
	return make([]byte, n), nil
}
