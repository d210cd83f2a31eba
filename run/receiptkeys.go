package run

import (
	"context"
	"crypto/ed25519"
	"encoding/base64"
	"fmt"
	"maps"
	"slices"
)

// ReceiptKey is the public half of a key that signs receipts. Keys are never removed: old receipts stay verifiable.
type ReceiptKey struct {
	ID        string `json:"id"`
	Algorithm string `json:"algorithm"`  // Ed25519 (RFC 8032)
	Public    string `json:"public_key"` // base64 (RFC 4648) of 32 bytes
}

// PutReceiptKey publishes a key under its id. The same again changes nothing; another key with that id is ErrExists.
func (s *Store) PutReceiptKey(ctx context.Context, id string, public ed25519.PublicKey) error {
	encoded := base64.StdEncoding.EncodeToString(public)
	made, err := s.rdb.HSetNX(ctx, s.keys.receiptKeys(), id, encoded).Result()
	if err != nil {
		return fmt.Errorf("publish receipt key %s: %w", id, unavailable(err))
	}
	if made {
		return nil
	}
	there, err := s.rdb.HGet(ctx, s.keys.receiptKeys(), id).Result()
	if err != nil {
		return fmt.Errorf("publish receipt key %s: %w", id, unavailable(err))
	}
	if there != encoded {
		return fmt.Errorf("publish receipt key %s: another has this id: %w", id, ErrExists)
	}
	return nil
}

// ReceiptKeys returns every key that signed receipts of this cell, by id.
func (s *Store) ReceiptKeys(ctx context.Context) ([]ReceiptKey, error) {
	all, err := s.rdb.HGetAll(ctx, s.keys.receiptKeys()).Result()
	if err != nil {
		return nil, fmt.Errorf("list receipt keys: %w", unavailable(err))
	}
	keys := make([]ReceiptKey, 0, len(all))
	for _, id := range slices.Sorted(maps.Keys(all)) {
		keys = append(keys, ReceiptKey{ID: id, Algorithm: "Ed25519", Public: all[id]})
	}
	return keys, nil
}
