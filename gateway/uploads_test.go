package gateway

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"crypto/tls"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/ephemeral-run/ephemeral/client"
	"github.com/ephemeral-run/ephemeral/run"
)

// uploadKeys are the keys of uploads in the cell.
func (l *live) uploadKeys() []string {
	l.t.Helper()
	o, err := goredis.ParseURL(redis.URL())
	l.must(err)
	rdb := goredis.NewClient(o)
	defer rdb.Close()
	keys, err := rdb.Keys(l.ctx, "{"+l.cell+"}:upload:*").Result()
	l.must(err)
	return keys
}

// pipe is a reader that cannot seek.
type pipe struct{ io.Reader }

func TestUploads(t *testing.T) {
	l := newLive(t, Config{})
	m, other := l.newMember("org_up", 1_000_000), l.newMember("org_other", 1_000_000)
	for _, size := range []int{0, 1, uploadPiece - 1, uploadPiece, uploadPiece + 1, 3*uploadPiece + 7} {
		content := bytes.Repeat([]byte("0123456789\x00"), size/11+1)[:size]
		sum := sha256.Sum256(content)
		for _, r := range []io.Reader{bytes.NewReader(content), pipe{bytes.NewReader(content)}} {
			u, err := m.Upload(l.ctx, r, client.UploadOptions{})
			l.must(err)
			if u.Size != int64(size) || u.SHA256 != hex.EncodeToString(sum[:]) || u.ExpiresAt.Sub(u.CreatedAt) != time.Hour || u.ZeroDataRetention {
				t.Errorf("%d bytes: %+v", size, u)
			}
			got, err := m.GetUpload(l.ctx, u.ID)
			if err != nil || got != u {
				t.Errorf("%+v, %v", got, err)
			}
			var p *client.Problem
			if _, err := other.GetUpload(l.ctx, u.ID); !errors.As(err, &p) || p.Status != 404 {
				t.Errorf("another organisation's: %v", err)
			}
			if err := other.DeleteUpload(l.ctx, u.ID); !errors.As(err, &p) || p.Status != 404 {
				t.Errorf("another organisation's: %v", err)
			}
			_, err = other.CreateRun(l.ctx, client.Request{Command: "true", Files: []run.File{{Path: "a", Upload: u.ID}}}, client.CreateOptions{})
			if !errors.As(err, &p) || p.Code != string(CodeUnknownUpload) || p.Errors[0].Field != "files[0].upload" {
				t.Errorf("a run of another organisation: %v", err)
			}
			created, err := m.CreateRun(l.ctx, client.Request{Command: "true", Files: []run.File{{Path: "a", Upload: u.ID}, {Path: "b"}}}, client.CreateOptions{})
			l.must(err)
			if err := m.DeleteUpload(l.ctx, u.ID); !errors.As(err, &p) || p.Code != string(CodeUploadInUse) {
				t.Errorf("while a run waits: %v", err)
			}
			lease := l.take()
			from, err := l.store.OpenUpload(l.ctx, lease, u.ID)
			l.must(err)
			arrived, err := io.ReadAll(from)
			if err != nil || !bytes.Equal(arrived, content) || lease.Run != created.Run.ID {
				t.Errorf("%d bytes arrived of %d, %v", len(arrived), size, err)
			}
			l.start(lease)
			l.must(l.store.FreeUploads(l.ctx, lease))
			l.must(m.DeleteUpload(l.ctx, u.ID))
			l.settle(lease)
		}
	}
	if keys := l.uploadKeys(); len(keys) > 0 {
		t.Errorf("left: %v", keys)
	}
}

func digestOf(body string) string {
	sum := sha256.Sum256([]byte(body))
	return "sha-256=:" + base64.StdEncoding.EncodeToString(sum[:]) + ":"
}

// TestUploadRequests: what is refused is not kept.
func TestUploadRequests(t *testing.T) {
	l := newLive(t, Config{Uploads: UploadConfig{Limit: 100, Bytes: 250, Count: 1000}})
	m := l.newMember("org_up", 0)
	tests := map[string]struct {
		query, body string
		header      []string
		want        Code // empty: 201
	}{
		"plain":                       {"", "x", nil, ""},
		"parameter":                   {"?zero_data_retention=false", "x", nil, ""},
		"other parameter":             {"?zdr=true", "x", nil, CodeInvalidParameter},
		"parameter twice":             {"?zero_data_retention=true&zero_data_retention=true", "x", nil, CodeInvalidParameter},
		"parameter's value":           {"?zero_data_retention=1", "x", nil, CodeInvalidParameter},
		"media type":                  {"", "x", []string{"Content-Type", "application/json"}, CodeUnsupportedMediaType},
		"no media type":               {"", "x", []string{"Content-Type", ""}, CodeUnsupportedMediaType},
		"encoding":                    {"", "x", []string{"Content-Encoding", "gzip"}, CodeUnsupportedMediaType},
		"identity":                    {"", "x", []string{"Content-Encoding", "identity"}, ""},
		"too large":                   {"", strings.Repeat("x", 101), nil, CodeBodyTooLarge},
		"as large as it may be":       {"", strings.Repeat("x", 100), nil, ""},
		"digest":                      {"", "x", []string{"Content-Digest", digestOf("x")}, ""},
		"digest of nothing":           {"", "", []string{"Content-Digest", digestOf("")}, ""},
		"digest among others":         {"", "x", []string{"Content-Digest", "md5=:eA==:, " + digestOf("x") + ",unixsum=:eA==:"}, ""},
		"digest of something else":    {"", "x", []string{"Content-Digest", digestOf("y")}, CodeDigestMismatch},
		"the last digest counts":      {"", "x", []string{"Content-Digest", digestOf("x") + ", " + digestOf("y")}, CodeDigestMismatch},
		"digest that is none":         {"", "x", []string{"Content-Digest", "sha-256=" + strings.Trim(digestOf("x"), "sha-256=:")}, CodeInvalidParameter},
		"digest that is short":        {"", "x", []string{"Content-Digest", "sha-256=:eA==:"}, CodeInvalidParameter},
		"digest that is not checked":  {"", "x", []string{"Content-Digest", "sha-512=:eA==:"}, CodeInvalidParameter},
		"idempotency key":             {"", "x", []string{"Idempotency-Key", `"k"`}, ""},
		"idempotency key that is bad": {"", "x", []string{"Idempotency-Key", `"k`}, CodeInvalidIdempotencyKey},
		"no API key":                  {"", "x", []string{"Authorization", ""}, CodeUnauthenticated},
		"another's role":              {"", "x", []string{"Authorization", "Bearer " + l.rootSecret}, CodeForbidden},
	}
	for name, tt := range tests {
		for _, chunked := range []bool{false, true} {
			req, err := http.NewRequestWithContext(l.ctx, "POST", l.url+"/v1/uploads"+tt.query, strings.NewReader(tt.body))
			l.must(err)
			if chunked {
				req.Body, req.ContentLength = io.NopCloser(pipe{strings.NewReader(tt.body)}), -1
			}
			req.Header.Set("Content-Type", "application/octet-stream")
			req.Header.Set("Authorization", "Bearer "+m.secret)
			for i := 0; i < len(tt.header); i += 2 {
				req.Header.Set(tt.header[i], tt.header[i+1])
			}
			resp, err := l.client.Do(req)
			l.must(err)
			a := read(t, resp)
			if tt.want != "" {
				if p := a.problem(t); p.Code != tt.want {
					t.Errorf("%s, chunked %v: %+v", name, chunked, p)
				}
			} else if location := a.Header.Get("Location"); a.StatusCode != 201 || !strings.HasPrefix(location, "/v1/uploads/upl_") {
				t.Errorf("%s, chunked %v: %d %s", name, chunked, a.StatusCode, a.body)
			} else if a := l.do(t, "DELETE", location, "", "Authorization", "Bearer "+m.secret); a.StatusCode != 204 {
				t.Errorf("%s: %d %s", name, a.StatusCode, a.body)
			}
			if keys := l.uploadKeys(); len(keys) > 0 {
				t.Fatalf("%s, chunked %v: left %v", name, chunked, keys)
			}
		}
	}
}

// TestUploadsOfAnOrganisation: a key's repetition is the same upload, and an organisation has so many bytes and no more.
func TestUploadsOfAnOrganisation(t *testing.T) {
	l := newLive(t, Config{Uploads: UploadConfig{Limit: 100, Bytes: 250, Life: time.Minute}})
	m := l.newMember("org_up", 0)
	up := func(body, key string) answer {
		t.Helper()
		return l.do(t, "POST", "/v1/uploads", body, "Authorization", "Bearer "+m.secret, "Content-Type", "application/octet-stream", "Idempotency-Key", key)
	}
	body := strings.Repeat("x", 100)
	first := up(body, "k1")
	if again := up(body, "k1"); again.StatusCode != 201 || again.body != first.body || again.Header.Get("Idempotency-Replayed") != "true" || first.Header.Get("Idempotency-Replayed") != "" {
		t.Errorf("%d %s, want %s", again.StatusCode, again.body, first.body)
	}
	if p := up("y", "k1").problem(t); p.Code != CodeIdempotencyConflict {
		t.Errorf("%+v", p)
	}
	if a := up(body, "k2"); a.StatusCode != 201 {
		t.Errorf("%d %s", a.StatusCode, a.body)
	}
	a := up(body, "k3")
	wait, err := strconv.Atoi(a.Header.Get("Retry-After"))
	if p := a.problem(t); p.Code != CodeUploadsFull || err != nil || wait < 50 || wait > 60 {
		t.Errorf("%+v, after %d s", p, wait)
	}
	if a := up(body[:50], "k4"); a.StatusCode != 201 {
		t.Errorf("%d %s", a.StatusCode, a.body)
	}
}

// TestRunsWithUploads: what a request may say of them.
func TestRunsWithUploads(t *testing.T) {
	l := newLive(t, Config{Uploads: UploadConfig{RunBytes: maxFileBytes}})
	m := l.newMember("org_up", 1_000_000)
	large, err := m.Upload(l.ctx, bytes.NewReader(make([]byte, maxFileBytes)), client.UploadOptions{})
	l.must(err)
	hidden, err := m.Upload(l.ctx, strings.NewReader("x"), client.UploadOptions{ZeroDataRetention: true})
	l.must(err)
	file := func(id run.UploadID) string { return fmt.Sprintf(`{"path":"a","upload":%q}`, id) }
	for name, tt := range map[string]struct {
		files, more string
		code        Code // empty: accepted
		field       string
	}{
		"alone":                   {file(large.ID), "", "", ""},
		"with a mode":             {fmt.Sprintf(`{"path":"a","upload":%q,"mode":"0755"}`, large.ID), "", "", ""},
		"with nothing besides":    {file(large.ID) + `,{"path":"b","content":""}`, "", "", ""},
		"with too much besides":   {file(large.ID) + `,{"path":"b","content":"x"}`, "", CodeInvalidRequest, "files"},
		"twice too large":         {file(large.ID) + strings.Replace(","+file(large.ID), `"a"`, `"b"`, 1), "", CodeInvalidRequest, "files"},
		"with content":            {fmt.Sprintf(`{"path":"a","upload":%q,"content":""}`, large.ID), "", CodeInvalidRequest, "files[0].upload"},
		"with encoding":           {fmt.Sprintf(`{"path":"a","upload":%q,"encoding":""}`, large.ID), "", CodeInvalidRequest, "files[0].encoding"},
		"neither":                 {`{"path":"a"}`, "", CodeInvalidRequest, "files[0].content"},
		"empty":                   {`{"path":"a","upload":""}`, "", CodeInvalidRequest, "files[0].upload"},
		"no id":                   {`{"path":"a","upload":"upl_1"}`, "", CodeUnknownUpload, "files[0].upload"},
		"a number":                {`{"path":"a","upload":1}`, "", CodeInvalidRequest, "files[0].upload"},
		"unknown":                 {`{"path":"b","content":""},` + file("upl_00000000000000000000000000000000"), "", CodeUnknownUpload, "files[1].upload"},
		"retained":                {file(large.ID), `,"zero_data_retention":true`, CodeInvalidRequest, "files[0].upload"},
		"in memory":               {file(hidden.ID), `,"zero_data_retention":true`, "", ""},
		"in memory, but retained": {file(hidden.ID), "", "", ""},
	} {
		a := l.do(t, "POST", "/v1/runs", `{"command":"true","files":[`+tt.files+`]`+tt.more+`}`, "Authorization", "Bearer "+m.secret)
		if tt.code == "" {
			if a.StatusCode != 202 {
				t.Errorf("%s: %d %s", name, a.StatusCode, a.body)
			}
			continue
		}
		if p := a.problem(t); p.Code != tt.code || len(p.Errors) != 1 || p.Errors[0].Field != tt.field {
			t.Errorf("%s: %+v", name, p)
		}
	}
	// The key's run is found again whatever became of its upload; another upload is another request.
	second, err := m.Upload(l.ctx, strings.NewReader("x"), client.UploadOptions{})
	l.must(err)
	r := client.Request{Command: "true", Files: []run.File{{Path: "a", Upload: second.ID}}}
	first, err := m.CreateRun(l.ctx, r, client.CreateOptions{IdempotencyKey: "k"})
	l.must(err)
	_, err = m.Cancel(l.ctx, first.Run.ID)
	l.must(err)
	l.must(m.DeleteUpload(l.ctx, second.ID))
	again, err := m.CreateRun(l.ctx, r, client.CreateOptions{IdempotencyKey: "k"})
	if err != nil || !again.Replayed || again.Run.ID != first.Run.ID {
		t.Errorf("%+v, %v", again, err)
	}
	r.Files[0].Upload = large.ID
	var p *client.Problem
	if _, err := m.CreateRun(l.ctx, r, client.CreateOptions{IdempotencyKey: "k"}); !errors.As(err, &p) || p.Code != string(CodeIdempotencyConflict) {
		t.Errorf("another upload: %v", err)
	}
}

// TestBrokenUploads: whatever becomes of a body on its way, nothing is kept of one that is not whole.
func TestBrokenUploads(t *testing.T) {
	dir := t.TempDir()
	cert, key := filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	pool := writeCertificate(t, cert, key, "uploads")
	plain := newLive(t, Config{ReadTimeout: time.Second, Uploads: UploadConfig{Limit: 1 << 20, Timeout: 2 * time.Second}})
	secure := newLive(t, Config{ReadTimeout: time.Second, Uploads: UploadConfig{Limit: 1 << 20}, TLSCert: cert, TLSKey: key})
	for _, l := range []*live{plain, secure} {
		store := l.store
		o, err := store.CreateOrg(l.ctx, run.Org{ID: "org_up", Name: "org_up"})
		l.must(err)
		_, secret, err := store.CreateKey(l.ctx, o.ID, "test", run.Member)
		l.must(err)
		head := "POST /v1/uploads HTTP/1.1\r\nHost: x\r\nContent-Type: application/octet-stream\r\nAuthorization: Bearer " + secret + "\r\n"
		part := strings.Repeat("x", 5000)
		chunk := fmt.Sprintf("%x\r\n%s\r\n", len(part), part)
		for name, tt := range map[string]struct {
			raw   string
			end   func(c net.Conn)
			want  int // 0: no answer is read
			again string
		}{
			"cut":                     {head + "Content-Length: 10000\r\n\r\n" + part, shut, 0, ""},
			"cut before it begins":    {head + "Content-Length: 10000\r\n\r\n", shut, 0, ""},
			"reset":                   {head + "Content-Length: 10000\r\n\r\n" + part, reset, 0, ""},
			"cut in a chunk":          {head + "Transfer-Encoding: chunked\r\n\r\n" + chunk + chunk[:100], shut, 0, ""},
			"cut between chunks":      {head + "Transfer-Encoding: chunked\r\n\r\n" + chunk + chunk, shut, 0, ""},
			"cut before all chunks":   {head + "Transfer-Encoding: chunked\r\n\r\n", shut, 0, ""},
			"cut in the last chunk":   {head + "Transfer-Encoding: chunked\r\n\r\n" + chunk + "0", shut, 0, ""},
			"cut in the end":          {head + "Transfer-Encoding: chunked\r\n\r\n" + chunk + "0\r\n", shut, 0, ""},
			"no chunk":                {head + "Transfer-Encoding: chunked\r\n\r\nzz\r\n", nothing, 400, ""},
			"stands still":            {head + "Content-Length: 10000\r\n\r\n" + part, nothing, 408, ""},
			"stands still, chunked":   {head + "Transfer-Encoding: chunked\r\n\r\n" + chunk, nothing, 408, ""},
			"more than it may be":     {head + "Transfer-Encoding: chunked\r\n\r\n" + strings.Repeat(chunk, 300) + "0\r\n\r\n", nothing, 413, ""},
			"announces too much":      {head + "Content-Length: 1048577\r\n\r\n" + strings.Repeat("x", 1048577), nothing, 413, ""},
			"whole, half closed":      {head + "Content-Length: 5000\r\n\r\n" + part, nothing, 201, ""},
			"whole in chunks":         {head + "Transfer-Encoding: chunked\r\n\r\n" + chunk + "0\r\n\r\n", nothing, 201, head + "Content-Length: 5000\r\n\r\n" + part},
			"whole in many chunks":    {head + "Transfer-Encoding: chunked\r\n\r\n" + strings.Repeat("1\r\nx\r\n", 5000) + "0\r\n\r\n", nothing, 201, ""},
			"whole, and another one":  {head + "Content-Length: 5000\r\n\r\n" + part, nothing, 201, head + "Transfer-Encoding: chunked\r\n\r\n" + chunk + "0\r\n\r\n"},
			"one byte after another":  {head + "Content-Length: 1000000\r\n\r\n", trickle, 408, ""},
			"chunks after each other": {head + "Transfer-Encoding: chunked\r\n\r\n", trickleChunks, 408, ""},
		} {
			nc, err := net.Dial("tcp", l.addr)
			l.must(err)
			c := nc
			if l == secure {
				c = tls.Client(nc, &tls.Config{RootCAs: pool, ServerName: "127.0.0.1"})
			}
			l.must(c.SetDeadline(time.Now().Add(10 * time.Second)))
			_, _ = io.WriteString(c, tt.raw+tt.again) // it may be cut off
			tt.end(c)
			if tt.want != 0 {
				in := bufio.NewReader(c)
				for range 1 + min(len(tt.again), 1) {
					resp, err := http.ReadResponse(in, nil)
					if err != nil {
						t.Errorf("%s: %v", name, err)
						break
					}
					a := read(t, resp)
					if a.StatusCode != tt.want {
						t.Errorf("%s: %d %s", name, a.StatusCode, a.body)
					}
					if a.StatusCode == 201 {
						l.must(store.DeleteUpload(l.ctx, "org_up", run.UploadID(strings.TrimPrefix(a.Header.Get("Location"), "/v1/uploads/"))))
					}
				}
			}
			c.Close()
			eventually(t, name+": nothing is left", func() bool { return len(l.uploadKeys()) == 0 && l.receivingNone() })
		}
	}
}

// receivingNone tells whether no upload is being received.
func (l *live) receivingNone() bool {
	n := int64(l.cfg.Uploads.Concurrency)
	if !l.receiving.TryAcquire(n) {
		return false
	}
	l.receiving.Release(n)
	return true
}

func nothing(net.Conn) {}

func shut(c net.Conn) { c.Close() }

func reset(c net.Conn) {
	time.Sleep(50 * time.Millisecond)
	if secure, ok := c.(*tls.Conn); ok {
		c = secure.NetConn()
	}
	_ = c.(*net.TCPConn).SetLinger(0)
	c.Close()
}

func trickle(c net.Conn) {
	for range 100 {
		if _, err := c.Write([]byte("x")); err != nil {
			return
		}
		time.Sleep(20 * time.Millisecond)
	}
}

func trickleChunks(c net.Conn) {
	for range 100 {
		if _, err := c.Write([]byte("1\r\nx\r\n")); err != nil {
			return
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// TestUploadAfterContinue: a client that waits for 100 Continue sends its body then.
func TestUploadAfterContinue(t *testing.T) {
	l := newLive(t, Config{})
	m := l.newMember("org_up", 0)
	c, err := net.Dial("tcp", l.addr)
	l.must(err)
	defer c.Close()
	l.must(c.SetDeadline(time.Now().Add(10 * time.Second)))
	fmt.Fprintf(c, "POST /v1/uploads HTTP/1.1\r\nHost: x\r\nContent-Type: application/octet-stream\r\nAuthorization: Bearer %s\r\nContent-Length: 100000\r\nExpect: 100-continue\r\n\r\n", m.secret)
	in := bufio.NewReader(c)
	line, err := in.ReadString('\n')
	if err != nil || !strings.HasPrefix(line, "HTTP/1.1 100 ") {
		t.Fatalf("%q, %v", line, err)
	}
	_, _ = in.ReadString('\n')
	_, err = io.WriteString(c, strings.Repeat("x", 100_000))
	l.must(err)
	resp, err := http.ReadResponse(in, nil)
	l.must(err)
	if a := read(t, resp); a.StatusCode != 201 || !strings.Contains(a.body, `"size":100000`) {
		t.Errorf("%d %s", a.StatusCode, a.body)
	}
}

// TestUploadsExpire: an upload that no run takes goes when its time is over.
func TestUploadsExpire(t *testing.T) {
	l := newLive(t, Config{Uploads: UploadConfig{Life: time.Second}})
	m := l.newMember("org_up", 1_000_000)
	var ids []run.UploadID
	for _, hidden := range []bool{false, true} {
		u, err := m.Upload(l.ctx, strings.NewReader("content"), client.UploadOptions{ZeroDataRetention: hidden})
		l.must(err)
		ids = append(ids, u.ID)
	}
	eventually(t, "nothing is left", func() bool { return len(l.uploadKeys()) == 0 })
	for _, id := range ids {
		var p *client.Problem
		if _, err := m.GetUpload(l.ctx, id); !errors.As(err, &p) || p.Status != 404 {
			t.Errorf("%v", err)
		}
		_, err := m.CreateRun(l.ctx, client.Request{Command: "true", Files: []run.File{{Path: "a", Upload: id}}}, client.CreateOptions{})
		if !errors.As(err, &p) || p.Code != string(CodeUnknownUpload) {
			t.Errorf("%v", err)
		}
	}
}
