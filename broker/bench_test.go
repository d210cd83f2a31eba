package broker_test

import (
	"io"
	"log/slog"
	"net/http"
	"strings"
	"testing"

	"github.com/ephemeral-run/ephemeral/broker"
	"github.com/ephemeral-run/ephemeral/broker/openaitest"
)

// BenchmarkCall compares calls through the broker with direct ones to the same provider.
func BenchmarkCall(b *testing.B) {
	answer := openaitest.Answer{Text: strings.Repeat("hello ", 20), Piece: 6, Usage: &openaitest.Usage{Prompt: 10, Completion: 2}}
	double := openaitest.New(b, testKey, answer)
	quiet := func(c *broker.Config) {
		c.Log, c.MaxCalls, c.CallRate = slog.New(slog.NewTextHandler(io.Discard, nil)), 1<<30, 1<<20
	}
	for name, body := range map[string]string{"whole": plainBody, "stream": streamBody} {
		b.Run(name+"/direct", func(b *testing.B) {
			defer http.DefaultClient.CloseIdleConnections()
			for b.Loop() {
				req, err := http.NewRequestWithContext(b.Context(), http.MethodPost, double.BaseURL+"/chat/completions", strings.NewReader(body))
				if err != nil {
					b.Fatal(err)
				}
				req.Header.Set("Authorization", "Bearer "+testKey)
				resp, err := http.DefaultClient.Do(req)
				if err != nil {
					b.Fatal(err)
				}
				if _, err := io.Copy(io.Discard, resp.Body); err != nil {
					b.Fatal(err)
				}
				resp.Body.Close()
			}
		})
		b.Run(name+"/broker", func(b *testing.B) {
			s := startSession(b, newProvider(b, double, quiet).Broker, newLedger(1<<50), &doubleSpec)
			for b.Loop() {
				if got := s.post(b.Context(), body); got.status != 200 {
					b.Fatal(got)
				}
			}
		})
	}
}
