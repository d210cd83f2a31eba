package worker

import (
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"

	"github.com/ephemeral-run/ephemeral/broker/openaitest"
)

// brokerDouble is a double of the broker: models are those of a double of a provider, all else is answered as scripted. It
// keeps what it was asked.
type brokerDouble struct {
	provider *openaitest.Server
	routes   map[string]http.HandlerFunc // by method and path

	mu    sync.Mutex
	asked []asked
}

type asked struct {
	Method, Path, Body string
	Header             http.Header `json:"-"`
}

// brokerSays answers with JSON, as the broker does.
func brokerSays(status int, code, body string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		text := []byte(body)
		if code != "" {
			w.Header().Set(errorHeader, code)
			text, _ = json.Marshal(map[string]any{"error": map[string]string{"code": code, "message": body, "type": "error"}})
		}
		w.WriteHeader(status)
		_, _ = w.Write(text)
	}
}

func (b *brokerDouble) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path == "/v1/chat/completions" {
		b.provider.ServeHTTP(w, r)
		return
	}
	body, _ := io.ReadAll(r.Body)
	b.mu.Lock()
	b.asked = append(b.asked, asked{r.Method, r.URL.RequestURI(), string(body), r.Header})
	b.mu.Unlock()
	answer, ok := b.routes[r.Method+" "+r.URL.Path]
	if !ok {
		answer = brokerSays(http.StatusNotFound, "not_found", "there is nothing here for this run")
	}
	answer(w, r)
}

// start serves the double and returns a piece of work whose broker it is.
func (b *brokerDouble) start(t testing.TB, m *machine) Config {
	server := httptest.NewServer(b)
	t.Cleanup(server.Close)
	transport := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "tcp", server.Listener.Addr().String())
	}}
	t.Cleanup(transport.CloseIdleConnections)
	return Config{
		Prompt: "do it", Model: "openai/double", HTTP: &http.Client{Transport: transport},
		Exec: m.exec, ReadFile: m.readFile, WriteFile: m.writeFile,
	}
}
