package broker

import (
	"encoding/json"
	"net/http"
	"strconv"
)

// The codes of the errors that a guest gets.
const (
	codeInvalid         = "invalid_request"
	codeTooLarge        = "request_too_large"
	codeNotFound        = "not_found"
	codeMethod          = "method_not_allowed"
	codeModelNotAllowed = "model_not_allowed"
	codeBudget          = "budget_exhausted"
	codeTooMany         = "too_many_requests"
	codeCallLimit       = "call_limit"
	codeModelError      = "model_error"
	codeUnavailable     = "unavailable"
	codeRunEnded        = "run_ended"
	codeWrongRun        = "wrong_run"
	codeReplayed        = "call_replayed"
	codeTooSlow         = "too_slow"
	codeRate            = "rate_limited"
	codeNotHere         = "method_not_allowed_here"
	codePath            = "path_not_allowed"
	codeAddress         = "address_not_allowed"
	codeRedirect        = "redirect_not_allowed"
	codeUpstream        = "upstream_error"
	codeUpstreamSlow    = "upstream_timeout"
	codeResponseLarge   = "response_too_large"
	codeWithheld        = "response_withheld"
	codeSQLNotAllowed   = "sql_not_allowed"
	codeSQL             = "sql_error"
	codeMalformed       = "malformed_request"
	codeTooManyConns    = "too_many_connections"
)

// problem is an error for the guest, in the form that OpenAI clients know. It is an error itself, for the way through the
// broker.
type problem struct {
	status  int
	code    string
	message string
	// param is the field at fault, if there is one.
	param string
	// upstream is the status of the provider's answer behind a model_error; 0 if there was none.
	upstream int
	// after is how long to wait before another try, in seconds; 0: what goes with the code.
	after int
}

func (p *problem) Error() string { return p.code + ": " + p.message }

// body is the error as a JSON document.
func (p *problem) body() []byte {
	kind := "invalid_request_error"
	switch {
	case p.status == http.StatusPaymentRequired:
		kind = "insufficient_quota"
	case p.status == http.StatusTooManyRequests:
		kind = "rate_limit_error"
	case p.status >= 500:
		kind = "server_error"
	}
	e := struct {
		Code     string `json:"code"`
		Message  string `json:"message"`
		Type     string `json:"type"`
		Param    string `json:"param,omitempty"`
		Upstream int    `json:"upstream_status,omitempty"`
	}{p.code, p.message, kind, p.param, p.upstream}
	out, err := json.Marshal(map[string]any{"error": e})
	if err != nil {
		return []byte(`{"error":{"code":"unavailable","message":"","type":"server_error"}}`) // strings always encode
	}
	return out
}

func (p *problem) write(w http.ResponseWriter) {
	h := w.Header()
	h.Set("Content-Type", "application/json")
	h.Set(headerError, p.code)
	switch {
	case p.after > 0:
		h.Set("Retry-After", strconv.Itoa(p.after))
	case p.status == http.StatusTooManyRequests && p.code != codeCallLimit || p.status == http.StatusServiceUnavailable:
		h.Set("Retry-After", "1")
	}
	w.WriteHeader(p.status)
	_, _ = w.Write(p.body()) // a guest that is gone needs no answer
}
