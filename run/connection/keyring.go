package connection

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"strings"
)

// KeySize is the size of a sealing key in bytes: AES-256.
const KeySize = 32

// What sealing and opening can fail with, for callers to decide on.
var (
	// ErrNoKey: there is no sealing key, or none that opens the credential.
	ErrNoKey = errors.New("no sealing key for the credential")
	// ErrSealBroken: the sealed credential was changed, or moved to another connection.
	ErrSealBroken = errors.New("sealed credential is damaged or belongs to another connection")
)

// sealVersion begins every sealed credential.
const sealVersion = "v1"

// Keyring seals credentials with its first key and opens them with any. A nil keyring has no keys. It is safe for
// concurrent use; printing it shows no key.
type Keyring struct {
	keys []sealKey
}

type sealKey struct {
	id   string // the first 8 bytes of SHA-256 of the key, in hexadecimal
	aead cipher.AEAD
}

// String shows how many keys there are.
func (k *Keyring) String() string {
	if k == nil {
		return "0 sealing keys"
	}
	return fmt.Sprintf("%d sealing keys", len(k.keys))
}

// GoString is String: %#v shows no key either.
func (k *Keyring) GoString() string { return k.String() }

// NewKey returns a fresh sealing key, encoded.
func NewKey() string {
	var b [KeySize]byte
	_, _ = rand.Read(b[:]) // never fails
	return base64.StdEncoding.EncodeToString(b[:])
}

// NewKeyring reads keys: base64 (RFC 4648) of 32 bytes each, separated by commas or white space, the newest first. Without
// any it returns nil. Errors never show a key.
func NewKeyring(keys string) (*Keyring, error) {
	words := strings.FieldsFunc(keys, func(r rune) bool { return r == ',' || r == ' ' || r == '\n' || r == '\r' || r == '\t' })
	if len(words) == 0 {
		return nil, nil
	}
	ring := &Keyring{}
	for i, w := range words {
		key, err := base64.StdEncoding.DecodeString(w)
		if err != nil || len(key) != KeySize {
			return nil, fmt.Errorf("sealing key %d is not base64 of %d bytes", i+1, KeySize)
		}
		block, err := aes.NewCipher(key)
		if err != nil {
			return nil, fmt.Errorf("sealing key %d: %w", i+1, err)
		}
		aead, err := cipher.NewGCM(block)
		if err != nil {
			return nil, fmt.Errorf("sealing key %d: %w", i+1, err)
		}
		sum := sha256.Sum256(key)
		clear(key)
		ring.keys = append(ring.keys, sealKey{id: hex.EncodeToString(sum[:8]), aead: aead})
	}
	return ring, nil
}

// ReadKeyring reads keys from a file, which only its owner may read.
func ReadKeyring(path string) (*Keyring, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("sealing key file: %w", err)
	}
	if info.Mode().Perm()&0o077 != 0 {
		return nil, fmt.Errorf("sealing key file %s: others than its owner may use it: chmod 600 it", path)
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("sealing key file: %w", err)
	}
	defer clear(data)
	ring, err := NewKeyring(string(data))
	if err != nil {
		return nil, fmt.Errorf("sealing key file %s: %w", path, err)
	}
	return ring, nil
}

// bound is what a sealed credential is tied to: a credential that is copied to another connection, or whose connection is
// pointed elsewhere behind the keyring's back, does not open.
func (c Connection) bound(org string) []byte {
	var b []byte
	for _, s := range []string{sealVersion, org, c.Name, string(c.Kind), c.BaseURL, string(c.Auth.Type), c.Auth.Name, c.Auth.User} {
		b = fmt.Appendf(b, "%d:%s,", len(s), s)
	}
	return b
}

// Seal returns the connection with the credential sealed for this organisation. An empty credential needs no key.
func (k *Keyring) Seal(org string, c Connection, credential string) (Sealed, error) {
	c.HasCredential = credential != ""
	if credential == "" {
		return Sealed{Connection: c}, nil
	}
	if k == nil || len(k.keys) == 0 {
		return Sealed{}, ErrNoKey
	}
	key := k.keys[0]
	nonce := make([]byte, key.aead.NonceSize())
	_, _ = rand.Read(nonce) // never fails
	box := key.aead.Seal(nonce, nonce, []byte(credential), c.bound(org))
	return Sealed{Connection: c, Credential: strings.Join([]string{sealVersion, key.id, base64.StdEncoding.EncodeToString(box)}, ".")}, nil
}

// Open returns the credential; empty when the connection has none. The error is ErrNoKey or ErrSealBroken.
func (k *Keyring) Open(org string, s Sealed) (string, error) {
	if s.Credential == "" {
		if s.Auth.Type != AuthNone {
			return "", ErrSealBroken
		}
		return "", nil
	}
	parts := strings.Split(s.Credential, ".")
	if len(parts) != 3 || parts[0] != sealVersion {
		return "", ErrSealBroken
	}
	box, err := base64.StdEncoding.DecodeString(parts[2])
	if err != nil {
		return "", ErrSealBroken
	}
	if k == nil {
		return "", ErrNoKey
	}
	for _, key := range k.keys {
		if key.id != parts[1] {
			continue
		}
		if len(box) < key.aead.NonceSize() {
			return "", ErrSealBroken
		}
		plain, err := key.aead.Open(nil, box[:key.aead.NonceSize()], box[key.aead.NonceSize():], s.bound(org))
		if err != nil {
			return "", ErrSealBroken
		}
		return string(plain), nil
	}
	return "", ErrNoKey
}

// Current tells whether the credential is sealed with the newest key.
func (k *Keyring) Current(s Sealed) bool {
	return s.Credential == "" || k != nil && len(k.keys) > 0 && strings.HasPrefix(s.Credential, sealVersion+"."+k.keys[0].id+".")
}

// Update returns what is to be stored for a connection that is put in the place of old (nil: there is none). A credential
// that is not given is kept, but only while the connection still presents it in the same way to the same base URL:
// otherwise whoever may change a connection could read its credential. The error is a *FieldError, ErrNoKey or
// ErrSealBroken.
func (k *Keyring) Update(org string, old *Sealed, c Connection, credential *string) (Sealed, error) {
	if credential == nil && old != nil && old.Credential != "" {
		if string(old.bound(org)) != string(c.bound(org)) {
			return Sealed{}, fault("credential", "must be given again: kind, base_url or auth changed")
		}
		kept, err := k.Open(org, *old)
		if err != nil {
			return Sealed{}, err
		}
		credential = &kept
	}
	given := ""
	if credential != nil {
		given = *credential
	}
	if err := c.CheckCredential(given); err != nil {
		return Sealed{}, err
	}
	return k.Seal(org, c, given)
}
