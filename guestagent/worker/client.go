package worker

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"
)

// The bounds of an answer of the broker.
const (
	maxAnswerBytes = 32 << 20
	maxErrorBytes  = 64 << 10
	maxText        = 1 << 20
	maxCalls       = 32
	maxArguments   = 512 << 10
	tries          = 4
	firstPause     = 200 * time.Millisecond
	mostPause      = 10 * time.Second
)

// answer is what the model said.
type answer struct {
	text  string
	calls []call
	cut   bool // the output limit ended it
}

type call struct {
	id, name, arguments string
}

// brokerError is an answer of the broker that is no answer of the model.
type brokerError struct {
	status  int
	code    string
	message string
	after   time.Duration
}

func (e *brokerError) Error() string {
	if e.code == "" {
		return fmt.Sprintf("the broker answered %d", e.status)
	}
	return fmt.Sprintf("%s: %s", e.code, e.message)
}

// tooLong tells whether a shorter conversation may pass.
func (e *brokerError) tooLong() bool {
	return e.code == "context_length_exceeded" || e.status == http.StatusRequestEntityTooLarge
}

// errBroken: the stream of an answer did not come to its end. It may be asked for again.
var errBroken = errors.New("the model's answer broke off")

type client struct {
	http  *http.Client
	sleep func(ctx context.Context, d time.Duration) error
}

// complete asks for one answer. The broker repeats what failed at the provider; here only what failed on the way to
// the broker, or broke off, is tried again.
func (c *client) complete(ctx context.Context, r chatRequest) (*answer, error) {
	body, err := json.Marshal(r)
	if err != nil {
		return nil, fmt.Errorf("encode request: %w", err)
	}
	for n := 1; ; n++ {
		a, err := c.once(ctx, body)
		if err == nil {
			return a, nil
		}
		if errors.Is(err, errTooMuch) {
			return nil, err
		}
		pause := min(firstPause<<(n-1), mostPause)
		var b *brokerError
		if errors.As(err, &b) {
			if b.status != http.StatusServiceUnavailable && b.code != "too_many_requests" {
				return nil, err
			}
			pause = max(pause, min(b.after, mostPause))
		}
		if n >= tries || ctx.Err() != nil || c.sleep(ctx, pause) != nil {
			return nil, err
		}
	}
}

func (c *client) once(ctx context.Context, body []byte) (*answer, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, BaseURL+"/v1/chat/completions", bytes.NewReader(body))
	if err != nil {
		return nil, fmt.Errorf("make request: %w", err)
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, fmt.Errorf("reach the broker: %w", err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return nil, readError(resp)
	}
	return readStream(io.LimitReader(resp.Body, maxAnswerBytes))
}

type errorDocument struct {
	Code    string `json:"code"`
	Message string `json:"message"`
}

func readError(resp *http.Response) error {
	data, err := io.ReadAll(io.LimitReader(resp.Body, maxErrorBytes))
	if err != nil {
		data = nil
	}
	return parseError(resp.StatusCode, resp.Header, data)
}
