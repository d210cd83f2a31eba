package gateway

import "net/http"

// Code names a kind of problem. Codes are stable: clients decide on them.
type Code string

// The codes. What each means to a client stands in Catalogue.
const (
	CodeInvalidJSON           Code = "invalid_json"
	CodeInvalidRequest        Code = "invalid_request"
	CodeUnknownModel          Code = "unknown_model"
	CodeUnknownConnection     Code = "unknown_connection"
	CodeUnknownImage          Code = "unknown_image"
	CodeImageNotAllowed       Code = "image_not_allowed"
	CodeUnknownUpload         Code = "unknown_upload"
	CodeUploadInUse           Code = "upload_in_use"
	CodeUploadsFull           Code = "uploads_full"
	CodeDigestMismatch        Code = "digest_mismatch"
	CodeInvalidIdempotencyKey Code = "invalid_idempotency_key"
	CodeInvalidParameter      Code = "invalid_parameter"
	CodeUnsupportedMediaType  Code = "unsupported_media_type"
	CodeBodyTooLarge          Code = "body_too_large"
	CodeHeaderTooLarge        Code = "header_too_large"
	CodeRequestTimeout        Code = "request_timeout"
	CodeBadRequest            Code = "bad_request"
	CodeUnauthenticated       Code = "unauthenticated"
	CodeForbidden             Code = "forbidden"
	CodeInsufficientFunds     Code = "insufficient_funds"
	CodeBudgetTooSmall        Code = "budget_too_small"
	CodeNotFound              Code = "not_found"
	CodeMethodNotAllowed      Code = "method_not_allowed"
	CodeRunNotFinished        Code = "run_not_finished"
	CodeConflict              Code = "conflict"
	CodeNoSealingKey          Code = "no_sealing_key"
	CodeIdempotencyConflict   Code = "idempotency_conflict"
	CodeQueueFull             Code = "queue_full"
	CodeRateLimited           Code = "rate_limited"
	CodeTooManyConnections    Code = "too_many_connections"
	CodeSignupClosed          Code = "signup_closed"
	CodeAlreadySignedUp       Code = "already_signed_up"
	CodeTrialExhausted        Code = "trial_exhausted"
	CodeTooManySignups        Code = "too_many_signups"
	CodeInternal              Code = "internal_error"
	CodeUnavailable           Code = "unavailable"
	CodeStorageFull           Code = "storage_full"
	CodeNotReady              Code = "not_ready"
)

// Entry describes one kind of problem.
type Entry struct {
	Code        Code
	Status      int    // HTTP status
	Title       string // the same for every problem of the kind
	Remediation string // what the client can do
	RetryAfter  int    // seconds after which the same request may succeed; 0: a retry alone does not help
}

// Catalogue lists every kind of problem that the API answers with.
var Catalogue = []Entry{
	{CodeInvalidJSON, http.StatusBadRequest, "The request body is not valid JSON",
		"Send one JSON object in UTF-8 without duplicate keys and with nothing after it.", 0},
	{CodeInvalidRequest, http.StatusBadRequest, "The request has invalid fields",
		"Correct the fields listed in errors and send the request again.", 0},
	{CodeUnknownModel, http.StatusBadRequest, "The model is not known",
		"Use a model id of the form provider/model that this server offers, or leave model out for the default.", 0},
	{CodeUnknownConnection, http.StatusBadRequest, "A connection is not known",
		"Use names of connections that your organisation has configured.", 0},
	{CodeUnknownImage, http.StatusUnprocessableEntity, "The image is not known",
		"Use the name of an image that all nodes of this server serve, or leave image out for base.", 0},
	{CodeImageNotAllowed, http.StatusForbidden, "The organisation may not use the image",
		"Use an image that your organisation may use, or ask an administrator to allow this one.", 0},
	{CodeUnknownUpload, http.StatusUnprocessableEntity, "An upload is not there",
		"Upload the file again and use the new id: an upload belongs to one organisation, and goes when it expires or its run is erased.", 0},
	{CodeUploadInUse, http.StatusConflict, "A run that waits needs the upload",
		"Wait for the run to start, or cancel it, then repeat the request.", 0},
	{CodeUploadsFull, http.StatusTooManyRequests, "The organisation has too many uploads",
		"Delete uploads that are not needed any more, or repeat the request when some have expired.", 60},
	{CodeDigestMismatch, http.StatusBadRequest, "The body is not what its digest says",
		"Compute Content-Digest over the bytes that are sent, and send them again.", 0},
	{CodeInvalidIdempotencyKey, http.StatusBadRequest, "The Idempotency-Key header is malformed",
		"Send one Idempotency-Key of 1 to 255 visible ASCII characters, for example a UUID in double quotes.", 0},
	{CodeInvalidParameter, http.StatusBadRequest, "A query or header parameter is invalid",
		"Correct the parameters listed in errors.", 0},
	{CodeUnsupportedMediaType, http.StatusUnsupportedMediaType, "The body's media type is not supported",
		"Send the body uncompressed with Content-Type: application/json, an upload with application/octet-stream.", 0},
	{CodeBodyTooLarge, http.StatusRequestEntityTooLarge, "The request body is too large",
		"Send fewer or smaller files, or upload them before the run.", 0},
	{CodeHeaderTooLarge, http.StatusRequestHeaderFieldsTooLarge, "The request header is too large",
		"Send a shorter address and fewer or shorter header fields.", 0},
	{CodeRequestTimeout, http.StatusRequestTimeout, "The request took too long to arrive",
		"Send the request again over a faster connection.", 1},
	{CodeBadRequest, http.StatusBadRequest, "The request is not valid HTTP",
		"Use an HTTP/1.1 client and check that no proxy changes the request.", 0},
	{CodeUnauthenticated, http.StatusUnauthorized, "The API key is missing or not valid",
		"Send Authorization: Bearer with an API key that exists and is not revoked.", 0},
	{CodeForbidden, http.StatusForbidden, "The API key may not do this",
		"Use a member key for runs and the account, and an admin key for organisations, credits and keys.", 0},
	{CodeInsufficientFunds, http.StatusPaymentRequired, "The account cannot pay for the run",
		"Add credit to the organisation, wait for other runs to end, or lower max_cost_micros.", 0},
	{CodeBudgetTooSmall, http.StatusPaymentRequired, "The budget cannot pay for the start of the run",
		"Raise max_cost_micros.", 0},
	{CodeNotFound, http.StatusNotFound, "There is no such resource",
		"Check the address and that the resource belongs to the organisation of the API key.", 0},
	{CodeMethodNotAllowed, http.StatusMethodNotAllowed, "The method is not allowed here",
		"Use one of the methods listed in the Allow header.", 0},
	{CodeRunNotFinished, http.StatusConflict, "The run has not ended",
		"Cancel the run or wait for its end, then repeat the request.", 0},
	{CodeConflict, http.StatusConflict, "The resource's state does not allow this",
		"Read the resource again and decide on its present state.", 0},
	{CodeNoSealingKey, http.StatusConflict, "The server cannot seal or open the credential",
		"Set EPHEMERAL_SEALING_KEY or EPHEMERAL_SEALING_KEY_FILE on gateways and nodes, or give the credential again.", 0},
	{CodeIdempotencyConflict, http.StatusUnprocessableEntity, "The idempotency key was used for another request",
		"Use a new Idempotency-Key for a new request; repeat a request with its own key and unchanged body.", 0},
	{CodeQueueFull, http.StatusTooManyRequests, "The organisation has too many waiting runs",
		"Wait for queued runs to start, then repeat the request with the same Idempotency-Key.", 5},
	{CodeRateLimited, http.StatusTooManyRequests, "The API key is used too often",
		"Repeat the request after the time in Retry-After, and keep to the rate in RateLimit-Policy.", 1},
	{CodeTooManyConnections, http.StatusServiceUnavailable, "The server has too many connections",
		"Repeat the request after the time in Retry-After, over few connections that stay open.", 1},
	{CodeSignupClosed, http.StatusForbidden, "Nobody can sign up here",
		"Ask the operator of the server for an organisation and a key.", 0},
	{CodeAlreadySignedUp, http.StatusConflict, "This sign-up has made its account already",
		"Use the key that the first answer has: it is shown once. If that answer is lost, sign up again with a new Idempotency-Key.", 0},
	{CodeTrialExhausted, http.StatusForbidden, "The trial credit is used up",
		"Ask the operator of the server for an organisation and a key.", 0},
	{CodeTooManySignups, http.StatusTooManyRequests, "The address has signed up too often",
		"Use the key of an earlier sign-up, or sign up again after the time in Retry-After.", 3600},
	{CodeInternal, http.StatusInternalServerError, "The server failed",
		"Repeat the request with the same Idempotency-Key; if it fails again, report the request id.", 0},
	{CodeUnavailable, http.StatusServiceUnavailable, "The server cannot answer now",
		"Repeat the request with the same Idempotency-Key after the time in Retry-After.", 2},
	{CodeStorageFull, http.StatusServiceUnavailable, "The server's disk is full",
		"Whoever runs the server frees space on the file system of EPHEMERAL_DATA_DIR (or of the Redis that EPHEMERAL_REDIS_URL names); it then goes on by itself. Repeat the request with the same Idempotency-Key after the time in Retry-After.", 5},
	{CodeNotReady, http.StatusServiceUnavailable, "The server is not ready",
		"Send no requests to this server until it reports ready.", 2},
}

var catalogue = func() map[Code]Entry {
	m := make(map[Code]Entry, len(Catalogue))
	for _, e := range Catalogue {
		m[e.Code] = e
	}
	return m
}()
