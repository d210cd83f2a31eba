package gateway

import (
	"strconv"
	"strings"
	"time"

	"github.com/gofiber/fiber/v2"
	"github.com/gofiber/fiber/v2/utils"
)

const (
	headerRequestID         = "X-Request-Id"
	headerIdempotencyKey    = "Idempotency-Key"
	headerIdempotencyReplay = "Idempotency-Replayed"
	headerPrefer            = "Prefer"
	headerPreferenceApplied = "Preference-Applied"
	headerLastEventID       = "Last-Event-ID"
	maxIdempotencyKey       = 255
	maxRequestID            = 64
	maxBearer               = 256
	secretPrefix            = "eph_"
)

// setHeader sets a header of the answer. The name is written as it goes out, each word with a capital, and the value has no line
// breaks: neither is looked at.
func setHeader(c *fiber.Ctx, name, value string) {
	c.Response().Header.SetCanonical(utils.UnsafeBytes(name), utils.UnsafeBytes(value)) // copies both
}

// headerValues returns copies of all values of a header field.
func headerValues(c *fiber.Ctx, name string) []string {
	raw := c.Request().Header.PeekAll(name)
	values := make([]string, len(raw))
	for i, v := range raw {
		values[i] = string(v)
	}
	return values
}

// idempotencyKey reads the Idempotency-Key header (draft-ietf-httpapi-idempotency-key-header-07): a string of
// structured fields (RFC 8941) in quotes, or the same without quotes. No header gives "".
func idempotencyKey(values []string) (string, error) {
	if len(values) == 0 {
		return "", nil
	}
	bad := func(detail string) error {
		return problem(CodeInvalidIdempotencyKey, "", FieldError{headerIdempotencyKey, detail})
	}
	if len(values) > 1 {
		return "", bad("is there more than once")
	}
	key := strings.Trim(values[0], " \t")
	if strings.HasPrefix(key, `"`) {
		unquoted, ok := unquoteString(key)
		if !ok {
			return "", bad("is not a string in double quotes")
		}
		key = unquoted
	} else if strings.ContainsAny(key, `",;\`) {
		return "", bad("must stand in double quotes to contain these characters")
	}
	if len(key) == 0 || len(key) > maxIdempotencyKey {
		return "", bad("must have 1 to 255 characters")
	}
	for i := range len(key) {
		if key[i] <= ' ' || key[i] > '~' {
			return "", bad("must be visible ASCII characters only")
		}
	}
	return key, nil
}

// unquoteString reads a structured-field string that fills s whole.
func unquoteString(s string) (string, bool) {
	if len(s) < 2 || s[0] != '"' || s[len(s)-1] != '"' {
		return "", false
	}
	var b strings.Builder
	for i := 1; i < len(s)-1; i++ {
		switch s[i] {
		case '"':
			return "", false
		case '\\':
			i++
			if i == len(s)-1 || (s[i] != '"' && s[i] != '\\') {
				return "", false
			}
		}
		b.WriteByte(s[i])
	}
	return b.String(), true
}

// preferredWait reads the wait preference of Prefer headers (RFC 7240): the first one counts, what cannot be
// understood is ignored. Without one it returns 0.
func preferredWait(values []string) time.Duration {
	for _, v := range values {
		for preference := range strings.SplitSeq(v, ",") {
			token, _, _ := strings.Cut(preference, ";") // parameters
			name, value, _ := strings.Cut(token, "=")
			if !strings.EqualFold(strings.TrimSpace(name), "wait") {
				continue
			}
			n, err := strconv.ParseUint(strings.Trim(strings.TrimSpace(value), `"`), 10, 31)
			if err != nil {
				return 0
			}
			return time.Duration(n) * time.Second
		}
	}
	return 0
}

// bearer reads the API key from Authorization headers (RFC 6750). ok is false when there is none or it cannot be one.
func bearer(values []string) (secret string, ok bool) {
	if len(values) != 1 {
		return "", false
	}
	scheme, token, found := strings.Cut(values[0], " ")
	if !found || !strings.EqualFold(scheme, "Bearer") {
		return "", false
	}
	token = strings.Trim(token, " ")
	if len(token) > maxBearer || !strings.HasPrefix(token, secretPrefix) {
		return "", false
	}
	for i := range len(token) {
		if !isTokenByte(token[i]) {
			return "", false
		}
	}
	return token, true
}

// isTokenByte tells whether c may stand in a bearer token or a request id.
func isTokenByte(c byte) bool {
	switch {
	case c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z', c >= '0' && c <= '9':
		return true
	}
	return strings.IndexByte("-._~+/=:", c) >= 0
}

// validRequestID tells whether a client's request id may be passed on.
func validRequestID(s string) bool {
	if s == "" || len(s) > maxRequestID {
		return false
	}
	for i := range len(s) {
		if !isTokenByte(s[i]) {
			return false
		}
	}
	return true
}

// lastEventID reads the number of the last event that the client has, from Last-Event-ID or else from ?after=.
func lastEventID(c *fiber.Ctx) (int64, error) {
	name, value := headerLastEventID, c.Get(headerLastEventID)
	if value == "" {
		name, value = "after", c.Query("after")
	}
	if value == "" {
		return 0, nil
	}
	n, err := strconv.ParseInt(value, 10, 64)
	if err != nil || n < 0 {
		return 0, problem(CodeInvalidParameter, "", FieldError{name, "must be the number of an event"})
	}
	return n, nil
}
