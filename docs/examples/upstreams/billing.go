package main

import (
	"context"
	"crypto/subtle"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"slices"
	"time"
)

// invoice is one of the sample invoices.
type invoice struct {
	ID          string `json:"id"`
	Customer    string `json:"customer"`
	AmountCents int64  `json:"amount_cents"`
	Currency    string `json:"currency"`
	Status      string `json:"status"` // open or paid
	Due         string `json:"due"`    // a day
}

var invoices = []invoice{
	{"inv-1001", "Aster Books", 12900, "EUR", "paid", "2026-08-15"},
	{"inv-1002", "Birch & Sons", 48050, "EUR", "open", "2026-09-30"},
	{"inv-1003", "Cedar Café", 7999, "EUR", "open", "2026-09-12"},
	{"inv-1004", "Aster Books", 31005, "EUR", "open", "2026-10-20"},
	{"inv-1005", "Dune Travel", 150000, "EUR", "paid", "2026-09-01"},
	{"inv-1006", "Cedar Café", 21001, "EUR", "open", "2026-11-02"},
	{"inv-1007", "Birch & Sons", 5995, "EUR", "open", "2026-10-05"},
}

// billing answers those who have the token. It has nothing that changes anything.
func billing(token string) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /invoices", func(w http.ResponseWriter, r *http.Request) {
		status := r.URL.Query().Get("status")
		found := slices.DeleteFunc(slices.Clone(invoices), func(i invoice) bool { return status != "" && i.Status != status })
		answer(w, http.StatusOK, map[string]any{"invoices": found})
	})
	mux.HandleFunc("GET /invoices/{id}", func(w http.ResponseWriter, r *http.Request) {
		i := slices.IndexFunc(invoices, func(i invoice) bool { return i.ID == r.PathValue("id") })
		if i < 0 {
			answer(w, http.StatusNotFound, map[string]any{"error": "there is no such invoice"})
			return
		}
		answer(w, http.StatusOK, invoices[i])
	})
	mux.HandleFunc("GET /customers", func(w http.ResponseWriter, _ *http.Request) {
		names := []string{}
		for _, i := range invoices {
			names = append(names, i.Customer)
		}
		slices.Sort(names)
		answer(w, http.StatusOK, map[string]any{"customers": slices.Compact(names)})
	})
	want := []byte("Bearer " + token)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if subtle.ConstantTimeCompare([]byte(r.Header.Get("Authorization")), want) != 1 {
			answer(w, http.StatusUnauthorized, map[string]any{"error": "the token is missing or wrong"})
			return
		}
		mux.ServeHTTP(w, r)
	})
}

func answer(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(v) // whoever asked may be gone
}

// serveBilling serves the billing API until ctx ends.
func serveBilling(ctx context.Context, l net.Listener, token string) error {
	server := &http.Server{Handler: billing(token), ReadHeaderTimeout: 10 * time.Second, ReadTimeout: 30 * time.Second, WriteTimeout: 30 * time.Second}
	stop := context.AfterFunc(ctx, func() { _ = server.Close() })
	defer stop()
	if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve the billing API: %w", err)
	}
	return nil
}
