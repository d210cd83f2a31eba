// Package door makes the broker reachable for the programs of a machine, as a plain HTTP server on the loopback. Programs
// need no credentials: the broker knows the run by the machine that asks, and adds what an upstream wants outside.
package door

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httputil"
	"strings"
	"time"

	"golang.org/x/net/netutil"
)

// Where programs find the door: http://broker.local.
const (
	Host    = "broker.local"
	Address = "127.0.0.1:80"
)

// The bounds of what programs may do to the agent. What they may do to others is for the broker to bound.
const (
	maxConns      = 64
	maxHeader     = 64 << 10
	headerTimeout = 10 * time.Second
	readTimeout   = time.Minute // of a whole request
	idleTimeout   = 30 * time.Second
)

// Door serves until it is closed.
type Door struct {
	server *http.Server
	ended  chan struct{}
}

// Open serves on the listener. broker reaches the broker, whatever the address of a request.
func Open(l net.Listener, broker http.RoundTripper, log *slog.Logger) *Door {
	proxy := &httputil.ReverseProxy{
		Rewrite:       rewrite,
		Transport:     broker,
		FlushInterval: -1, // streams are passed on as they come
		ErrorLog:      slog.NewLogLogger(slog.DiscardHandler, slog.LevelError),
		ErrorHandler: func(w http.ResponseWriter, _ *http.Request, err error) {
			if !errors.Is(err, context.Canceled) {
				log.Warn("a program's request did not reach the broker", "error", err)
			}
			refuse(w)
		},
	}
	d := &Door{ended: make(chan struct{}), server: &http.Server{
		Handler:           plain(proxy),
		ReadHeaderTimeout: headerTimeout,
		ReadTimeout:       readTimeout,
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    maxHeader,
		ErrorLog:          slog.NewLogLogger(slog.DiscardHandler, slog.LevelError), // what programs do wrong is theirs
	}}
	go func() {
		defer close(d.ended)
		if err := d.server.Serve(netutil.LimitListener(l, maxConns)); !errors.Is(err, http.ErrServerClosed) {
			log.Error("door closed", "error", err)
		}
	}()
	return d
}

// Close ends the door and every request through it.
func (d *Door) Close() error {
	err := d.server.Close()
	<-d.ended
	if err != nil {
		return fmt.Errorf("close door: %w", err)
	}
	return nil
}

// credentials are headers that programs written for an upstream send and that say nothing here. A connection may be
// allowed to have them: there the broker decides.
var credentials = []string{"Authorization", "Cookie", "Api-Key", "X-Api-Key", "Openai-Organization", "Openai-Project"}

// rewrite makes a program's request one of the broker.
func rewrite(r *httputil.ProxyRequest) {
	r.Out.URL.Scheme, r.Out.URL.Host, r.Out.Host = "http", "broker", "broker"
	if strings.HasPrefix(r.In.URL.Path, "/connections/") {
		return
	}
	for _, name := range credentials {
		r.Out.Header.Del(name)
	}
}

// plain refuses what is more than a request and an answer: what came of it would be no longer bounded here.
func plain(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodConnect || r.Header.Get("Upgrade") != "" {
			w.WriteHeader(http.StatusNotImplemented)
			return
		}
		h.ServeHTTP(w, r)
	})
}

func refuse(w http.ResponseWriter) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Ephemeral-Error", "unavailable")
	w.WriteHeader(http.StatusBadGateway)
	body, err := json.Marshal(map[string]any{"error": map[string]string{
		"code": "unavailable", "message": "the broker could not be reached", "type": "server_error",
	}})
	if err == nil {
		_, _ = w.Write(body)
	}
}
