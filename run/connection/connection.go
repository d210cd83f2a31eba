// Package connection says what a connection is: a named upstream that an organisation's runs may reach through the broker,
// with a credential that is sealed wherever it is kept.
package connection

import (
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"time"
	"unicode/utf8"
)

// Kind says how an upstream is spoken to.
type Kind string

// The kinds of connections.
const (
	HTTP     Kind = "http"
	Postgres Kind = "postgres"
)

// AuthType says where an upstream expects the credential.
type AuthType string

// The ways to authenticate at an HTTP upstream. At PostgreSQL the credential is the password of the user in the base URL,
// and the type is AuthBasic or AuthNone.
const (
	AuthNone   AuthType = "none"
	AuthBearer AuthType = "bearer" // Authorization: Bearer <credential> (RFC 6750)
	AuthBasic  AuthType = "basic"  // Authorization: Basic of <user>:<credential> (RFC 7617)
	AuthHeader AuthType = "header" // <name>: <credential>
	AuthQuery  AuthType = "query"  // ?<name>=<credential>
)

// Auth says how the credential is presented. It never holds the credential.
type Auth struct {
	Type AuthType `json:"type"`
	Name string   `json:"name,omitempty"` // of the header or the query parameter
	User string   `json:"user,omitempty"` // of basic
}

// Connection is one upstream of an organisation. Limits that are 0 have their defaults.
type Connection struct {
	Name        string `json:"name"`
	Kind        Kind   `json:"kind"`
	Description string `json:"description,omitempty"` // shown to the model
	// BaseURL is http(s)://host[:port][/path], or postgres://user@host[:port]/database?sslmode=verify-full.
	BaseURL         string   `json:"base_url"`
	Auth            Auth     `json:"auth"`
	Methods         []string `json:"methods,omitempty"`          // HTTP; empty: GET and HEAD
	Paths           []string `json:"paths,omitempty"`            // HTTP, see Pattern; empty: all below the base URL
	RequestHeaders  []string `json:"request_headers,omitempty"`  // that go along beside the harmless ones
	ResponseHeaders []string `json:"response_headers,omitempty"` // that come back beside the harmless ones

	MaxRequestBytes  int64 `json:"max_request_bytes,omitempty"`  // default 1 MiB
	MaxResponseBytes int64 `json:"max_response_bytes,omitempty"` // default 4 MiB
	MaxRows          int   `json:"max_rows,omitempty"`           // PostgreSQL; default 1000
	TimeoutSeconds   int   `json:"timeout_seconds,omitempty"`    // of one call, redirects included; default 30
	RatePerMinute    int   `json:"rate_per_minute,omitempty"`    // calls of all the organisation's runs on one node; default 600

	HasCredential bool      `json:"has_credential"`
	CreatedAt     time.Time `json:"created_at"`
	UpdatedAt     time.Time `json:"updated_at"`
}

// Sealed is a connection with its credential as it is stored.
type Sealed struct {
	Connection
	// Credential is the sealed credential; empty when there is none.
	Credential string `json:"sealed_credential,omitempty"`
}

// The bounds of a connection.
const (
	MaxName          = 64
	maxDescription   = 500
	maxURL           = 1024
	maxPaths         = 64
	maxHeaders       = 32
	MaxCredential    = 8 << 10
	mostRequest      = 32 << 20
	mostResponse     = 32 << 20
	mostRows         = 100_000
	mostTimeout      = 300
	mostRate         = 1_000_000
	defaultRequest   = 1 << 20
	defaultResponse  = 4 << 20
	defaultRows      = 1000
	defaultTimeout   = 30
	defaultPerMinute = 600
)

// ErrInvalid: a connection's definition cannot be used. The error's text names the field.
var ErrInvalid = errors.New("invalid connection")

// FieldError is what is wrong with one field of a connection. It is ErrInvalid.
type FieldError struct {
	Field, Detail string
}

// Error names field and fault.
func (e *FieldError) Error() string { return e.Field + ": " + e.Detail }

// Is makes it ErrInvalid.
func (e *FieldError) Is(target error) bool { return target == ErrInvalid }

func fault(field, format string, args ...any) error {
	return &FieldError{field, fmt.Sprintf(format, args...)}
}

var (
	namePattern  = regexp.MustCompile(`^[a-z0-9][a-z0-9_-]{0,63}$`)
	tokenPattern = regexp.MustCompile("^[!#$%&'*+.^_`|~0-9A-Za-z-]{1,128}$") // RFC 9110, 5.6.2
)

// ValidName tells whether a connection may have this name.
func ValidName(name string) bool { return namePattern.MatchString(name) }

// Check returns the connection with its defaults filled in and its lists in canonical form. The error is a *FieldError.
func (c Connection) Check() (Connection, error) {
	switch {
	case !ValidName(c.Name):
		return c, fault("name", "must have 1 to %d of a-z, 0-9, _ and -, a letter or digit first", MaxName)
	case len(c.Description) > maxDescription || !utf8.ValidString(c.Description) || strings.ContainsFunc(c.Description, control):
		return c, fault("description", "must have at most %d bytes of text without control characters", maxDescription)
	}
	if c.Kind == "" {
		c.Kind = HTTP
	}
	if c.Auth.Type == "" {
		c.Auth.Type = AuthNone
	}
	var err error
	switch c.Kind {
	case HTTP:
		c, err = c.checkHTTP()
	case Postgres:
		c, err = c.checkPostgres()
	default:
		return c, fault("kind", "must be %s or %s", HTTP, Postgres)
	}
	if err != nil {
		return c, err
	}
	return c.limits()
}

func (c Connection) limits() (Connection, error) {
	for _, l := range []struct {
		field       string
		value       *int64
		least, most int64
		def         int64
	}{
		{"max_request_bytes", &c.MaxRequestBytes, 1, mostRequest, defaultRequest},
		{"max_response_bytes", &c.MaxResponseBytes, 1, mostResponse, defaultResponse},
	} {
		if err := bounded(l.field, l.value, l.least, l.most, l.def); err != nil {
			return c, err
		}
	}
	for _, l := range []struct {
		field     string
		value     *int
		most, def int
	}{
		{"max_rows", &c.MaxRows, mostRows, defaultRows},
		{"timeout_seconds", &c.TimeoutSeconds, mostTimeout, defaultTimeout},
		{"rate_per_minute", &c.RatePerMinute, mostRate, defaultPerMinute},
	} {
		if c.Kind == HTTP && l.field == "max_rows" {
			if *l.value != 0 {
				return c, fault(l.field, "belongs to connections of kind %s", Postgres)
			}
			continue
		}
		n := int64(*l.value)
		if err := bounded(l.field, &n, 1, int64(l.most), int64(l.def)); err != nil {
			return c, err
		}
		*l.value = int(n)
	}
	return c, nil
}

func bounded(field string, v *int64, least, most, def int64) error {
	if *v == 0 {
		*v = def
	}
	if *v < least || *v > most {
		return fault(field, "must be between %d and %d", least, most)
	}
	return nil
}

// allowedMethods are the methods that a connection may allow: none of them changes what a connection is (CONNECT) or shows
// the credential (TRACE).
var allowedMethods = []string{"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}

func (c Connection) checkHTTP() (Connection, error) {
	if _, err := c.Base(); err != nil {
		return c, err
	}
	if len(c.Methods) == 0 {
		c.Methods = []string{"GET", "HEAD"}
	}
	methods := []string{}
	for i, m := range c.Methods {
		m = strings.ToUpper(m)
		if !slices.Contains(allowedMethods, m) || slices.Contains(methods, m) {
			return c, fault(fmt.Sprintf("methods[%d]", i), "must be one of %s, and only once", strings.Join(allowedMethods, ", "))
		}
		methods = append(methods, m)
	}
	c.Methods = methods
	if len(c.Paths) > maxPaths {
		return c, fault("paths", "has more than %d patterns", maxPaths)
	}
	if len(c.Paths) == 0 {
		c.Paths = []string{"/**"}
	}
	for i, p := range c.Paths {
		if _, err := ParsePattern(p); err != nil {
			return c, fault(fmt.Sprintf("paths[%d]", i), "%v", err)
		}
	}
	var err error
	if c.RequestHeaders, err = headerNames("request_headers", c.RequestHeaders); err != nil {
		return c, err
	}
	if c.ResponseHeaders, err = headerNames("response_headers", c.ResponseHeaders); err != nil {
		return c, err
	}
	return c, c.checkAuth()
}

// hopByHop are headers that are about one connection between two hosts (RFC 9110, 7.6.1), or that the broker makes itself.
var hopByHop = []string{"Connection", "Proxy-Connection", "Keep-Alive", "Te", "Trailer", "Transfer-Encoding", "Upgrade", "Host",
	"Content-Length", "Expect", "Proxy-Authenticate", "Proxy-Authorization", "Accept-Encoding", "Content-Encoding", "Set-Cookie",
	"Ephemeral-Error", "Ephemeral-Run", "Ephemeral-Call-Id"}

func headerNames(field string, names []string) ([]string, error) {
	if len(names) > maxHeaders {
		return nil, fault(field, "has more than %d names", maxHeaders)
	}
	var all []string
	for i, n := range names {
		if !tokenPattern.MatchString(n) {
			return nil, fault(fmt.Sprintf("%s[%d]", field, i), "is no header's name")
		}
		n = http.CanonicalHeaderKey(n)
		if slices.Contains(hopByHop, n) {
			return nil, fault(fmt.Sprintf("%s[%d]", field, i), "%s cannot be passed on", n)
		}
		if !slices.Contains(all, n) {
			all = append(all, n)
		}
	}
	return all, nil
}

func (c Connection) checkAuth() error {
	a := c.Auth
	switch a.Type {
	case AuthNone, AuthBearer, AuthBasic:
		if a.Name != "" {
			return fault("auth.name", "belongs to %s and %s", AuthHeader, AuthQuery)
		}
	case AuthHeader:
		if !tokenPattern.MatchString(a.Name) || slices.Contains(hopByHop, http.CanonicalHeaderKey(a.Name)) {
			return fault("auth.name", "must be the name of a header that may carry a credential")
		}
	case AuthQuery:
		if !tokenPattern.MatchString(a.Name) {
			return fault("auth.name", "must be the name of a query parameter")
		}
	default:
		return fault("auth.type", "must be %s, %s, %s, %s or %s", AuthNone, AuthBearer, AuthBasic, AuthHeader, AuthQuery)
	}
	if (a.Type == AuthBasic) != (a.User != "") || strings.Contains(a.User, ":") || strings.ContainsFunc(a.User, control) || len(a.User) > 256 {
		return fault("auth.user", "must be given with %s, without a colon, and only then", AuthBasic)
	}
	if slices.ContainsFunc(c.RequestHeaders, func(n string) bool { return n == c.AuthHeader() }) {
		return fault("request_headers", "%s carries the credential", c.AuthHeader())
	}
	return nil
}

// AuthHeader is the canonical name of the header that carries the credential; empty when none does.
func (c Connection) AuthHeader() string {
	switch c.Auth.Type {
	case AuthBearer, AuthBasic:
		return "Authorization"
	case AuthHeader:
		return http.CanonicalHeaderKey(c.Auth.Name)
	}
	return ""
}

// Base is the parsed base URL of an HTTP connection.
func (c Connection) Base() (*url.URL, error) {
	u, err := parseURL(c.BaseURL)
	if err != nil {
		return nil, err
	}
	switch {
	case u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.Hostname() == "":
		return nil, fault("base_url", "must be http(s)://host[:port][/path]")
	case u.User != nil:
		return nil, fault("base_url", "must hold no user or password: they belong into auth and credential")
	case u.RawQuery != "" || u.ForceQuery || u.Fragment != "":
		return nil, fault("base_url", "must have no query or fragment")
	}
	if u.Path != "" && u.Path != "/" {
		if _, err := ParsePath(u.EscapedPath()); err != nil {
			return nil, fault("base_url", "%v", err)
		}
	}
	return u, nil
}

func parseURL(s string) (*url.URL, error) {
	if s == "" || len(s) > maxURL {
		return nil, fault("base_url", "must have 1 to %d bytes", maxURL)
	}
	u, err := url.Parse(s)
	if err != nil {
		return nil, fault("base_url", "is no URL") // the parser's error shows it, and it may hold a password
	}
	return u, nil
}

// sslModes are the ways in which a connection to PostgreSQL may be protected. Those that fall back to plain text without a
// word are not among them.
var sslModes = []string{"disable", "require", "verify-ca", "verify-full"}

func (c Connection) checkPostgres() (Connection, error) {
	u, err := parseURL(c.BaseURL)
	if err != nil {
		return c, err
	}
	database := strings.TrimPrefix(u.Path, "/")
	if (u.Scheme != "postgres" && u.Scheme != "postgresql") || u.Hostname() == "" || database == "" || strings.Contains(database, "/") || u.Fragment != "" || strings.Contains(u.Host, ",") {
		return c, fault("base_url", "must be postgres://user@host[:port]/database[?sslmode=...]")
	}
	if u.User.Username() == "" {
		return c, fault("base_url", "must name the user")
	}
	if _, has := u.User.Password(); has {
		return c, fault("base_url", "must hold no password: it is the credential")
	}
	for name, values := range u.Query() {
		if name != "sslmode" || len(values) != 1 || !slices.Contains(sslModes, values[0]) {
			return c, fault("base_url", "may have the parameter sslmode only: %s", strings.Join(sslModes, ", "))
		}
	}
	if len(c.Methods)+len(c.Paths)+len(c.RequestHeaders)+len(c.ResponseHeaders) > 0 {
		return c, fault("kind", "%s has no methods, paths or headers", Postgres)
	}
	if c.Auth.Type != AuthNone && c.Auth.Type != AuthBasic || c.Auth.Name != "" || c.Auth.User != "" {
		return c, fault("auth", "must be {\"type\": \"basic\"} (the credential is the password) or {\"type\": \"none\"}")
	}
	return c, nil
}

// CheckCredential tells what is wrong with a credential for this connection. The text never shows it.
func (c Connection) CheckCredential(credential string) error {
	switch {
	case c.Auth.Type == AuthNone && credential != "":
		return fault("credential", "is given, but auth.type is %s", AuthNone)
	case c.Auth.Type == AuthNone:
		return nil
	case credential == "":
		return fault("credential", "is required with auth.type %s", c.Auth.Type)
	case len(credential) > MaxCredential || !utf8.ValidString(credential) || strings.ContainsFunc(credential, control):
		return fault("credential", "must have at most %d bytes of text without control characters", MaxCredential)
	case len(credential) < minCredential:
		return fault("credential", "must have at least %d bytes: shorter ones cannot be told from chance in what upstreams answer", minCredential)
	}
	return nil
}

// minCredential is how many bytes a credential must have to be found in an answer.
const minCredential = 8

// AllowsMethod tells whether a request may have this method.
func (c Connection) AllowsMethod(m string) bool { return slices.Contains(c.Methods, m) }

// Timeout is how long one call may take.
func (c Connection) Timeout() time.Duration { return time.Duration(c.TimeoutSeconds) * time.Second }

func control(r rune) bool { return r < 0x20 || r == 0x7f }
