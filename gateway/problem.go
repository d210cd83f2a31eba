package gateway

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/http"
	"strconv"
	"time"

	"github.com/gofiber/fiber/v2"

	"github.com/ephemeral-run/ephemeral/run"
)

// typeBase is the prefix of a problem's type; the code follows.
const typeBase = "https://github.com/ephemeral-run/ephemeral/blob/main/docs/errors.md#"

// maxFieldErrors bounds how many field errors one problem lists.
const maxFieldErrors = 20

// Problem is the body of every answer that is not a success: problem details for HTTP (RFC 9457).
type Problem struct {
	Type        string       `json:"type"`
	Title       string       `json:"title"`
	Status      int          `json:"status"`
	Detail      string       `json:"detail"`
	Code        Code         `json:"code"`
	Errors      []FieldError `json:"errors,omitempty"`
	Remediation string       `json:"remediation"`
	RequestID   string       `json:"request_id"`

	cause      error         // for the log, never for the client
	retryAfter time.Duration // 0: what the catalogue says
}

// FieldError names one field at fault, e.g. "files[2].path", and says what is wrong with it.
type FieldError struct {
	Field  string `json:"field"`
	Detail string `json:"detail"`
}

// Error makes a Problem an error.
func (p *Problem) Error() string {
	if p.cause != nil {
		return fmt.Sprintf("%s: %s: %v", p.Code, p.Detail, p.cause)
	}
	return fmt.Sprintf("%s: %s", p.Code, p.Detail)
}

// Unwrap gives the cause.
func (p *Problem) Unwrap() error { return p.cause }

// problem makes a problem of the code's kind. An empty detail is replaced by the kind's title.
func problem(code Code, detail string, fields ...FieldError) *Problem {
	e, ok := catalogue[code]
	if !ok {
		panic("gateway: problem code without catalogue entry: " + string(code))
	}
	if detail == "" {
		detail = e.Title + "."
	}
	if len(fields) > maxFieldErrors {
		fields = fields[:maxFieldErrors]
	}
	return &Problem{
		Type: typeBase + string(code), Title: e.Title, Status: e.Status, Detail: detail,
		Code: code, Errors: fields, Remediation: e.Remediation,
	}
}

// because attaches the cause for the log.
func (p *Problem) because(err error) *Problem {
	p.cause = err
	return p
}

// after says when the same request may succeed, where that is known.
func (p *Problem) after(d time.Duration) *Problem {
	p.retryAfter = d
	return p
}

// retrySeconds is the Retry-After header of a problem: whole seconds, rounded up, since who comes too early is refused
// again. 0: a retry alone does not help.
func (p *Problem) retrySeconds() int {
	if p.retryAfter > 0 {
		return int(math.Ceil(p.retryAfter.Seconds()))
	}
	return catalogue[p.Code].RetryAfter
}

// toProblem turns whatever a handler returned into a problem. Texts of unknown errors stay in the log.
func toProblem(err error) *Problem {
	var p *Problem
	if errors.As(err, &p) {
		return p
	}
	var fe *fiber.Error
	if errors.As(err, &fe) {
		return fromFiber(fe)
	}
	var ue *run.UploadError
	if errors.As(err, &ue) {
		return uploadProblem(ue)
	}
	switch {
	case errors.Is(err, run.ErrNotFound):
		return problem(CodeNotFound, "")
	case errors.Is(err, run.ErrUnauthenticated):
		return problem(CodeUnauthenticated, "")
	case errors.Is(err, run.ErrIdempotencyConflict):
		return problem(CodeIdempotencyConflict, "", FieldError{"Idempotency-Key", "was used with another request body"})
	case errors.Is(err, run.ErrInsufficientFunds):
		return problem(CodeInsufficientFunds, "The available balance is below max_cost_micros; nothing was reserved.",
			FieldError{"max_cost_micros", "is more than the account has available"})
	case errors.Is(err, run.ErrImage):
		return problem(CodeImageNotAllowed, "", FieldError{"image", "is not one that your organisation may use"})
	case errors.Is(err, run.ErrBudget):
		return problem(CodeBudgetTooSmall, "", FieldError{"max_cost_micros", "cannot pay for the first slice of compute"})
	case errors.Is(err, run.ErrQueueFull):
		return queueFull(err)
	case errors.Is(err, run.ErrUploadsFull):
		return uploadsFull(err)
	case errors.Is(err, run.ErrState), errors.Is(err, run.ErrExists):
		return problem(CodeConflict, "")
	case errors.Is(err, run.ErrRange):
		return problem(CodeInvalidRequest, "A value is outside what can be stored.")
	case errors.Is(err, run.ErrStorageFull):
		return storageFull(err)
	case errors.Is(err, run.ErrUnavailable), errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled):
		return problem(CodeUnavailable, "").because(err)
	}
	return problem(CodeInternal, "").because(err)
}

// storageFull says what keeps the store from changes: its disk is full.
func storageFull(err error) *Problem {
	return problem(CodeStorageFull, "The disk that keeps the runs has no room, so nothing new is accepted; runs can be read.").because(err)
}

// queueFull tells when there will be room, where that can be estimated.
func queueFull(err error) *Problem {
	var full *run.QueueFullError
	if !errors.As(err, &full) || full.RetryAfter <= 0 {
		return problem(CodeQueueFull, "")
	}
	return problem(CodeQueueFull, fmt.Sprintf("As many runs wait as may. By how long runs took lately there will be room for this one in %s.",
		full.RetryAfter.Round(100*time.Millisecond))).after(full.RetryAfter)
}

// fromFiber turns the errors of the HTTP server itself into problems.
func fromFiber(e *fiber.Error) *Problem {
	switch e.Code {
	case http.StatusNotFound:
		return problem(CodeNotFound, "No resource has this address.")
	case http.StatusMethodNotAllowed:
		return problem(CodeMethodNotAllowed, "")
	case http.StatusRequestEntityTooLarge:
		return problem(CodeBodyTooLarge, "")
	case http.StatusRequestHeaderFieldsTooLarge:
		return problem(CodeHeaderTooLarge, "")
	case http.StatusRequestTimeout:
		return problem(CodeRequestTimeout, "")
	case http.StatusUnsupportedMediaType:
		return problem(CodeUnsupportedMediaType, "")
	}
	if e.Code >= http.StatusInternalServerError && e.Code != http.StatusBadGateway {
		return problem(CodeInternal, "").because(e)
	}
	return problem(CodeBadRequest, "").because(e)
}

// writeProblem answers with p.
func writeProblem(c *fiber.Ctx, p *Problem) error {
	p.RequestID = requestID(c)
	body, err := json.Marshal(p)
	if err != nil {
		return fmt.Errorf("encode problem: %w", err)
	}
	secureHeaders(c)
	c.Set(fiber.HeaderContentType, "application/problem+json")
	if s := p.retrySeconds(); s > 0 {
		c.Set(fiber.HeaderRetryAfter, strconv.Itoa(s))
	}
	if p.Status == http.StatusUnauthorized {
		c.Set(fiber.HeaderWWWAuthenticate, challenge(c))
	}
	return c.Status(p.Status).Send(body)
}
