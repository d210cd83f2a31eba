// Package receipt signs what a run's outward calls cost, and verifies it. The broker signs the data of every model, web and
// connection event; whoever has the public key can prove afterwards that no event was changed, and which are missing.
//
// What is signed is the text "ephemeral receipt v1\n", the run's id, a line feed, the event's type, a line feed, and the
// event's data as JSON as it is stored, without white space, with an empty signature in it. Under zero data retention the
// stored data, which has no content, is signed by itself.
package receipt

import (
	"crypto/ed25519"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/ephemeral-run/ephemeral/run"
)

const prefix = "ephemeral receipt v1\n"

// Signer signs receipts. It is safe for concurrent use; printing it shows no key.
type Signer struct {
	key ed25519.PrivateKey
	id  string
}

// NewSigner makes a signer from a seed: base64 (RFC 4648) of 32 bytes. Errors never show it.
func NewSigner(seed string) (*Signer, error) {
	b, err := base64.StdEncoding.DecodeString(strings.TrimSpace(seed))
	if err != nil || len(b) != ed25519.SeedSize {
		return nil, fmt.Errorf("receipt key is not base64 of %d bytes", ed25519.SeedSize)
	}
	defer clear(b)
	return signer(ed25519.NewKeyFromSeed(b)), nil
}

func signer(key ed25519.PrivateKey) *Signer {
	return &Signer{key: key, id: signerID(key.Public().(ed25519.PublicKey))}
}

// NewSeed returns a fresh seed, encoded.
func NewSeed() string {
	var b [ed25519.SeedSize]byte
	_, _ = rand.Read(b[:]) // never fails
	return base64.StdEncoding.EncodeToString(b[:])
}

// ReadSigner reads the seed from a file, which only its owner may read.
func ReadSigner(path string) (*Signer, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("receipt key file: %w", err)
	}
	if info.Mode().Perm()&0o077 != 0 {
		return nil, fmt.Errorf("receipt key file %s: others than its owner may use it: chmod 600 it", path)
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("receipt key file: %w", err)
	}
	defer clear(data)
	s, err := NewSigner(string(data))
	if err != nil {
		return nil, fmt.Errorf("receipt key file %s: %w", path, err)
	}
	return s, nil
}

// ID names the key: the first 8 bytes of SHA-256 of the public key, in hexadecimal.
func (s *Signer) ID() string { return s.id }

// Public is the public key.
func (s *Signer) Public() ed25519.PublicKey { return s.key.Public().(ed25519.PublicKey) }

// String shows the key's id.
func (s *Signer) String() string { return "receipt key " + s.id }

// GoString is String: %#v shows no key either.
func (s *Signer) GoString() string { return s.String() }

// Sign returns the data, a run.ModelData or run.CallData, with its receipt.
func (s *Signer) Sign(id run.ID, t run.EventType, data any, call string, number int64, at time.Time) (any, error) {
	r := &run.Receipt{Call: call, Number: number, At: at.UnixMicro(), Key: s.id}
	data, err := withReceipt(printable(data), r)
	if err != nil {
		return nil, err
	}
	text, err := statement(id, t, data)
	if err != nil {
		return nil, err
	}
	r.Signature = base64.StdEncoding.EncodeToString(ed25519.Sign(s.key, text))
	return data, nil
}

// printable replaces bytes that are no text: JSON could not keep them.
func printable(data any) any {
	fix := func(s string) string { return strings.ToValidUTF8(s, "\uFFFD") }
	switch d := data.(type) {
	case run.ModelData:
		d.Model, d.Error = fix(d.Model), fix(d.Error)
		return d
	case run.CallData:
		d.Kind, d.Target, d.Method, d.Error = fix(d.Kind), fix(d.Target), fix(d.Method), fix(d.Error)
		return d
	}
	return data
}

func withReceipt(data any, r *run.Receipt) (any, error) {
	switch d := data.(type) {
	case run.ModelData:
		d.Receipt = r
		return d, nil
	case run.CallData:
		d.Receipt = r
		return d, nil
	}
	return nil, fmt.Errorf("no receipt for data of type %T", data)
}

// statement is what is signed. The signature in data must be empty.
func statement(id run.ID, t run.EventType, data any) ([]byte, error) {
	text, err := json.Marshal(data)
	if err != nil {
		return nil, fmt.Errorf("encode a receipt's data: %w", err)
	}
	return append([]byte(prefix+string(id)+"\n"+string(t)+"\n"), text...), nil
}

// What is wrong with an event's receipt.
var (
	ErrNone      = errors.New("no receipt")
	ErrKey       = errors.New("signed with an unknown key")
	ErrSignature = errors.New("signature does not fit")
)

// Verify checks the receipt of one event: ErrNone, ErrKey or ErrSignature when it does not hold.
func Verify(e run.Event, keys map[string]ed25519.PublicKey) error {
	r := Of(e)
	if r == nil {
		return ErrNone
	}
	key, ok := keys[r.Key]
	if !ok || len(key) != ed25519.PublicKeySize {
		return ErrKey
	}
	signature, err := base64.StdEncoding.DecodeString(r.Signature)
	if err != nil || len(signature) != ed25519.SignatureSize {
		return ErrSignature
	}
	unsigned := *r
	unsigned.Signature = ""
	data, err := withReceipt(e.Data, &unsigned)
	if err != nil {
		return ErrNone
	}
	text, err := statement(e.Run, e.Type, data)
	if err != nil || !ed25519.Verify(key, text, signature) {
		return ErrSignature
	}
	return nil
}

// Of is the event's receipt; nil if it has none.
func Of(e run.Event) *run.Receipt {
	switch d := e.Data.(type) {
	case run.ModelData:
		return d.Receipt
	case run.CallData:
		return d.Receipt
	}
	return nil
}

// Check is what a run's receipts say together.
type Check struct {
	Valid   int      `json:"valid"`
	Micros  int64    `json:"charged_micros"` // of the valid ones
	Faults  []Fault  `json:"faults"`
	Missing []int64  `json:"missing"` // numbers below the greatest that no valid receipt has
	Keys    []string `json:"keys"`    // that signed the valid ones
}

// Fault is an event whose receipt does not hold.
type Fault struct {
	Seq    int64  `json:"seq"`
	Type   string `json:"type"`
	Reason string `json:"reason"`
}

// Holds tells whether every outward call has a valid receipt and none is missing. What was cut off at the end of a
// timeline that has not ended cannot be known.
func (c Check) Holds() bool { return len(c.Faults) == 0 && len(c.Missing) == 0 }

// CheckAll verifies every outward call of a run's events.
func CheckAll(id run.ID, events []run.Event, keys map[string]ed25519.PublicKey) Check {
	c := Check{Faults: []Fault{}, Missing: []int64{}, Keys: []string{}}
	seen, used := map[int64]bool{}, map[string]bool{}
	most := int64(0)
	for _, e := range events {
		if e.Type != run.EventModel && e.Type != run.EventWeb && e.Type != run.EventConnection {
			continue
		}
		err := Verify(e, keys)
		if err == nil && e.Run != id {
			err = errors.New("belongs to another run")
		}
		r := Of(e)
		if err == nil && (r.Number < 1 || seen[r.Number]) {
			err = errors.New("its number was there before")
		}
		if err != nil {
			c.Faults = append(c.Faults, Fault{e.Seq, string(e.Type), err.Error()})
			continue
		}
		c.Valid++
		seen[r.Number] = true
		most = max(most, r.Number)
		if !used[r.Key] {
			used[r.Key] = true
			c.Keys = append(c.Keys, r.Key)
		}
		c.Micros += charged(e)
	}
	for n := int64(1); n < most && len(c.Missing) < 1000; n++ {
		if !seen[n] {
			c.Missing = append(c.Missing, n)
		}
	}
	return c
}

func charged(e run.Event) int64 {
	switch d := e.Data.(type) {
	case run.ModelData:
		return int64(d.Charged)
	case run.CallData:
		return int64(d.Charged)
	}
	return 0
}

// Keys decodes public keys as they are served. Those that make no sense are left out.
func Keys(all []run.ReceiptKey) map[string]ed25519.PublicKey {
	keys := map[string]ed25519.PublicKey{}
	for _, k := range all {
		b, err := base64.StdEncoding.DecodeString(k.Public)
		if err == nil && len(b) == ed25519.PublicKeySize && signerID(b) == k.ID {
			keys[k.ID] = b
		}
	}
	return keys
}

func signerID(public ed25519.PublicKey) string {
	sum := sha256.Sum256(public)
	return hex.EncodeToString(sum[:8])
}
