package client

import (
	"encoding/json"
	"fmt"
	"io"
	"mime"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// maxProblem bounds how much of a refusal is read.
const maxProblem = 64 << 10

// Problem is the server's refusal (problem details, RFC 9457). Get it from an error with errors.As.
type Problem struct {
	Type        string       `json:"type"`
	Title       string       `json:"title"`
	Status      int          `json:"status"` // HTTP status
	Detail      string       `json:"detail"`
	Code        string       `json:"code"` // stable; decide on this. Empty when the answer was not the server's own
	Errors      []FieldError `json:"errors"`
	Remediation string       `json:"remediation"`
	RequestID   string       `json:"request_id"`

	RetryAfter time.Duration `json:"-"` // from the header; 0: none given
}

// FieldError names one field of the request at fault.
type FieldError struct {
	Field  string `json:"field"`
	Detail string `json:"detail"`
}

// Error says what was refused, why, and what helps.
func (p *Problem) Error() string {
	var b strings.Builder
	if p.Code != "" {
		b.WriteString(p.Code + ": ")
	}
	b.WriteString(p.Detail)
	for i, f := range p.Errors {
		sep := "; "
		if i == 0 {
			sep = " "
		}
		fmt.Fprintf(&b, "%s%s %s", sep, f.Field, f.Detail)
	}
	if p.RequestID != "" {
		fmt.Fprintf(&b, " (request %s)", p.RequestID)
	}
	return b.String()
}

// readProblem turns an answer that is no success into a Problem, also when it comes from something in between.
func readProblem(resp *http.Response) *Problem {
	p := &Problem{}
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxProblem))
	mediaType, _, _ := mime.ParseMediaType(resp.Header.Get("Content-Type"))
	if err != nil || mediaType != "application/problem+json" || json.Unmarshal(body, p) != nil {
		*p = Problem{Title: http.StatusText(resp.StatusCode), Detail: "the server answered " + resp.Status}
	}
	p.Status = resp.StatusCode
	p.RetryAfter = retryAfter(resp.Header.Get("Retry-After"))
	return p
}

// retryAfter reads a Retry-After header (RFC 9110): seconds or a date.
func retryAfter(v string) time.Duration {
	if v == "" {
		return 0
	}
	if n, err := strconv.ParseUint(v, 10, 31); err == nil {
		return time.Duration(n) * time.Second
	}
	if t, err := http.ParseTime(v); err == nil {
		return max(time.Until(t), 0)
	}
	return 0
}
