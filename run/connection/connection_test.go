package connection

import (
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

func TestCheck(t *testing.T) {
	good := Connection{Name: "billing", BaseURL: "https://api.example.com/v1", Auth: Auth{Type: AuthBearer}}
	c, err := good.Check()
	if err != nil {
		t.Fatal(err)
	}
	if c.Kind != HTTP || fmt.Sprint(c.Methods, c.Paths) != "[GET HEAD] [/**]" || c.MaxResponseBytes != 4<<20 || c.TimeoutSeconds != 30 {
		t.Errorf("defaults: %+v", c)
	}
	for field, change := range map[string]func(*Connection){
		"name":               func(c *Connection) { c.Name = "a/b" },
		"description":        func(c *Connection) { c.Description = "a\x1b[0m" },
		"kind":               func(c *Connection) { c.Kind = "ftp" },
		"base_url":           func(c *Connection) { c.BaseURL = "https://user:pw@api.example.com" },
		"base_url ":          func(c *Connection) { c.BaseURL = "file:///etc/passwd" },
		"base_url  ":         func(c *Connection) { c.BaseURL = "https://api.example.com/a/../b" },
		"base_url   ":        func(c *Connection) { c.BaseURL = "https://api.example.com/?x=1" },
		"auth.type":          func(c *Connection) { c.Auth.Type = "digest" },
		"auth.name":          func(c *Connection) { c.Auth = Auth{Type: AuthHeader, Name: "Transfer-Encoding"} },
		"auth.name ":         func(c *Connection) { c.Auth = Auth{Type: AuthHeader, Name: "X\r\nY"} },
		"auth.user":          func(c *Connection) { c.Auth = Auth{Type: AuthBasic} },
		"auth.user ":         func(c *Connection) { c.Auth = Auth{Type: AuthBasic, User: "a:b"} },
		"methods[0]":         func(c *Connection) { c.Methods = []string{"CONNECT"} },
		"methods[0] ":        func(c *Connection) { c.Methods = []string{"TRACE"} },
		"paths[0]":           func(c *Connection) { c.Paths = []string{"/a/**/b"} },
		"paths[0] ":          func(c *Connection) { c.Paths = []string{"/a*"} },
		"request_headers[0]": func(c *Connection) { c.RequestHeaders = []string{"host"} },
		"request_headers":    func(c *Connection) { c.RequestHeaders = []string{"authorization"} },
		"response_headers[0]": func(c *Connection) {
			c.ResponseHeaders = []string{"Set-Cookie"}
		},
		"max_response_bytes": func(c *Connection) { c.MaxResponseBytes = 1 << 40 },
		"timeout_seconds":    func(c *Connection) { c.TimeoutSeconds = -1 },
		"rate_per_minute":    func(c *Connection) { c.RatePerMinute = 1 << 30 },
		"max_rows":           func(c *Connection) { c.MaxRows = 5 },
	} {
		c := good
		change(&c)
		_, err := c.Check()
		var f *FieldError
		if !errors.As(err, &f) || !errors.Is(err, ErrInvalid) || f.Field != strings.TrimSpace(field) {
			t.Errorf("%s: got %v", field, err)
		}
	}
}

func TestCheckPostgres(t *testing.T) {
	for base, want := range map[string]bool{
		"postgres://reader@db.example.com/shop":                      true,
		"postgres://reader@db.example.com:6432/shop?sslmode=require": true,
		"postgres://reader:pw@db.example.com/shop":                   false,
		"postgres://db.example.com/shop":                             false,
		"postgres://reader@db.example.com":                           false,
		"postgres://reader@db.example.com/shop?sslmode=prefer":       false,
		"postgres://reader@db.example.com/shop?host=/tmp":            false,
		"postgres://reader@a.example.com,b.example.com/shop":         false,
		"https://reader@db.example.com/shop":                         false,
	} {
		_, err := Connection{Name: "w", Kind: Postgres, BaseURL: base, Auth: Auth{Type: AuthBasic}}.Check()
		if (err == nil) != want {
			t.Errorf("%s: %v", base, err)
		}
		if err != nil && strings.Contains(err.Error(), "pw") {
			t.Errorf("%s: the error shows the password: %v", base, err)
		}
	}
}

func TestPaths(t *testing.T) {
	for _, hostile := range []string{
		"", "a", "/..", "/a/../b", "/%2e%2e/b", "/a/%2E%2e", "/a/./b", "/a//b", "//evil.example", "/a%2fb", "/a%2Fb", "/a%5cb", "/a\\b",
		"/a%00", "/a%0d%0aX: y", "/a\r\n", "/%252e%252e/", "/a%252fb", "/..;/b", "/..;x=1/b", "/%2e%2e;/b", "/a%zz", "/a%", "/%ff",
		"/" + strings.Repeat("a", 5000), "/" + strings.Repeat("a/", 100),
	} {
		if p, err := ParsePath(hostile); err == nil {
			t.Errorf("%q is taken as %v", hostile, p)
		}
	}
	for in, want := range map[string]string{
		"/": "/", "/a": "/a", "/a/": "/a/", "/a%20b": "/a%20b", "/%61": "/a", "/100%25": "/100%25", "/ä": "/%C3%A4", "/a;b": "/a%3Bb", "/a?b": "/a%3Fb", "/a%23b": "/a%23b",
	} {
		p, err := ParsePath(in)
		if err != nil || p.String() != want {
			t.Errorf("%q: %q, %v; want %q", in, p, err, want)
		}
	}
}

func TestPatterns(t *testing.T) {
	for _, c := range []struct {
		pattern, path string
		want          bool
	}{
		{"/**", "/", true}, {"/**", "/a/b", true}, {"/v1/**", "/v1", true}, {"/v1/**", "/v1/", true}, {"/v1/**", "/v1/a/b", true},
		{"/v1/**", "/v2/a", false}, {"/v1/**", "/v1a", false}, {"/v1/*", "/v1/a", true}, {"/v1/*", "/v1/", false}, {"/v1/*", "/v1/a/b", false},
		{"/v1/*/lines", "/v1/7/lines", true}, {"/v1/*/lines", "/v1/7/line", false}, {"/v1", "/v1", true}, {"/v1", "/v1/", false},
		{"/v1", "/V1", false}, {"/v1", "/%76%31", true},
	} {
		if got := (Connection{Paths: []string{c.pattern}}).AllowsPath(mustPath(t, c.path)); got != c.want {
			t.Errorf("%s covers %s: %v", c.pattern, c.path, got)
		}
	}
}

func mustPath(t *testing.T, s string) Path {
	t.Helper()
	p, err := ParsePath(s)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// FuzzPath: whatever is accepted means the same after it was sent and read again, has no dot segments, and stays below the
// base URL.
func FuzzPath(f *testing.F) {
	for _, s := range []string{"/", "/a/b", "/a%20b/", "/%2e%2e", "/..;/x", "/a%252e", "/ä/%F0%9F%98%80"} {
		f.Add(s)
	}
	base, err := url.Parse("https://api.example.com/v1")
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, s string) {
		p, err := ParsePath(s)
		if err != nil {
			return
		}
		again, err := ParsePath(p.String())
		if err != nil || again.String() != p.String() || fmt.Sprint(again) != fmt.Sprint(p) {
			t.Fatalf("%q becomes %q, and that %q: %v", s, p, again, err)
		}
		u := p.Below(base)
		read, err := url.Parse(u.String())
		if err != nil || read.Host != "api.example.com" || read.RawQuery != "" || read.Fragment != "" || !strings.HasPrefix(read.Path, "/v1/") {
			t.Fatalf("%q becomes %q: %v", s, u, err)
		}
		if clean := read.JoinPath(); strings.TrimSuffix(clean.Path, "/") != strings.TrimSuffix(read.Path, "/") {
			t.Fatalf("%q is %q for a server that cleans paths, which is %q", s, read.Path, clean.Path)
		}
	})
}

// FuzzHeaderName: a header that is allowed is a token, and none that steers a connection.
func FuzzHeaderName(f *testing.F) {
	for _, s := range []string{"x-trace", "Host", "transfer-encoding", "a\r\nb", "", "Te"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		names, err := headerNames("request_headers", []string{s})
		if err != nil {
			return
		}
		if len(names) != 1 || !tokenPattern.MatchString(names[0]) {
			t.Fatalf("%q gives %q", s, names)
		}
		for _, bad := range hopByHop {
			if strings.EqualFold(names[0], bad) {
				t.Fatalf("%q gives %q", s, names)
			}
		}
	})
}

const credential = "tok-MARKER-0123456789"

func ring(t testing.TB, keys ...string) *Keyring {
	t.Helper()
	k, err := NewKeyring(strings.Join(keys, ","))
	if err != nil {
		t.Fatal(err)
	}
	return k
}

func example(t testing.TB) Connection {
	t.Helper()
	c, err := Connection{Name: "billing", BaseURL: "https://api.example.com", Auth: Auth{Type: AuthBearer}}.Check()
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestSealing(t *testing.T) {
	key := NewKey()
	k, c := ring(t, key), example(t)
	sealed, err := k.Seal("acme", c, credential)
	if err != nil || strings.Contains(fmt.Sprintf("%+v", sealed), "MARKER") || !sealed.HasCredential {
		t.Fatalf("%+v, %v", sealed, err)
	}
	if got, err := k.Open("acme", sealed); err != nil || got != credential {
		t.Fatalf("%q, %v", got, err)
	}
	twice, err := k.Seal("acme", c, credential)
	if err != nil || twice.Credential == sealed.Credential {
		t.Error("sealing twice gives the same text: the nonce repeats")
	}
	for what, change := range map[string]func(*Sealed){
		"name": func(s *Sealed) { s.Name = "other" }, "host": func(s *Sealed) { s.BaseURL = "https://evil.example" },
		"auth": func(s *Sealed) { s.Auth = Auth{Type: AuthQuery, Name: "q"} }, "text": func(s *Sealed) { s.Credential = s.Credential[:len(s.Credential)-4] + "AAAA" },
		"form": func(s *Sealed) { s.Credential = "v1.x" }, "none": func(s *Sealed) { s.Credential = "" },
	} {
		s := sealed
		change(&s)
		if got, err := k.Open("acme", s); err == nil || got != "" {
			t.Errorf("%s changed: opens as %q", what, got)
		}
	}
	if _, err := k.Open("other", sealed); !errors.Is(err, ErrSealBroken) {
		t.Errorf("another organisation: %v", err)
	}
	if _, err := ring(t, NewKey()).Open("acme", sealed); !errors.Is(err, ErrNoKey) {
		t.Errorf("another key: %v", err)
	}
	var none *Keyring
	if _, err := none.Seal("acme", c, credential); !errors.Is(err, ErrNoKey) {
		t.Errorf("no key: %v", err)
	}
	if s := fmt.Sprintf("%v %+v %#v", k, k, k); strings.Contains(s, key[:8]) {
		t.Errorf("printing shows the key: %s", s)
	}
}

func TestRotation(t *testing.T) {
	older, newer := NewKey(), NewKey()
	sealed, err := ring(t, older).Seal("acme", example(t), credential)
	if err != nil {
		t.Fatal(err)
	}
	both := ring(t, newer, older)
	if both.Current(sealed) {
		t.Error("sealed with the older key, but current")
	}
	again, err := both.Update("acme", &sealed, sealed.Connection, nil)
	if err != nil || !both.Current(again) {
		t.Fatalf("not sealed anew: %v", err)
	}
	if got, err := ring(t, newer).Open("acme", again); err != nil || got != credential {
		t.Errorf("with the newer key alone: %q, %v", got, err)
	}
}

func TestUpdateKeepsTheCredentialOnlyWhereItWas(t *testing.T) {
	k := ring(t, NewKey())
	old, err := k.Seal("acme", example(t), credential)
	if err != nil {
		t.Fatal(err)
	}
	c := old.Connection
	c.Paths = []string{"/v1/**"}
	if s, err := k.Update("acme", &old, c, nil); err != nil || !s.HasCredential {
		t.Errorf("another path: %+v, %v", s, err)
	}
	c.BaseURL = "https://evil.example"
	if _, err := k.Update("acme", &old, c, nil); !errors.Is(err, ErrInvalid) {
		t.Errorf("another host: %v", err)
	}
	c = old.Connection
	c.Auth = Auth{Type: AuthQuery, Name: "q"}
	if _, err := k.Update("acme", &old, c, nil); !errors.Is(err, ErrInvalid) {
		t.Errorf("another way: %v", err)
	}
	c.Auth = Auth{Type: AuthNone}
	if _, err := k.Update("acme", &old, c, nil); !errors.Is(err, ErrInvalid) {
		t.Errorf("no auth, the credential kept: %v", err)
	}
	short := "short"
	if _, err := k.Update("acme", &old, old.Connection, &short); !errors.Is(err, ErrInvalid) || strings.Contains(err.Error(), short+"\"") {
		t.Errorf("a short one: %v", err)
	}
}

func TestKeyFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "key")
	if err := os.WriteFile(path, []byte(NewKey()+"\n"+NewKey()+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if k, err := ReadKeyring(path); err != nil || k.String() != "2 sealing keys" {
		t.Errorf("%v, %v", k, err)
	}
	if err := os.Chmod(path, 0o640); err != nil {
		t.Fatal(err)
	}
	if _, err := ReadKeyring(path); err == nil {
		t.Error("a file that others may read was read")
	}
	for _, bad := range []string{"x", "AAAA", NewKey()[:40]} {
		if _, err := NewKeyring(bad); err == nil || strings.Contains(err.Error(), bad) {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

// Whatever is sealed opens to the same, and only for the same organisation.
func TestSealingProperty(t *testing.T) {
	k, c := ring(t, NewKey(), NewKey()), example(t)
	rapid.Check(t, func(t *rapid.T) {
		secret, org := rapid.StringN(1, 200, 800).Draw(t, "secret"), rapid.StringN(1, 20, 60).Draw(t, "org")
		s, err := k.Seal(org, c, secret)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := k.Open(org, s); err != nil || got != secret {
			t.Fatalf("%q, %v", got, err)
		}
		if _, err := k.Open(org+"x", s); err == nil {
			t.Fatal("opens for another organisation")
		}
	})
}
