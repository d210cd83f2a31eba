package run

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"strings"
	"time"

	"github.com/google/uuid"
)

// UploadID names an upload: "upl_" and 32 lower-case hexadecimal digits, like an ID.
type UploadID string

// ParseUploadID checks that s has the form of an upload's id. It returns ErrNotFound otherwise.
func ParseUploadID(s string) (UploadID, error) {
	if !validUpload(s) {
		return "", fmt.Errorf("upload id %.64q: %w", s, ErrNotFound)
	}
	return UploadID(s), nil
}

// Upload is a file that a client sent ahead of the runs that use it.
type Upload struct {
	ID        UploadID  `json:"id"`
	Size      int64     `json:"size"`   // bytes
	SHA256    string    `json:"sha256"` // of the content, hexadecimal
	CreatedAt time.Time `json:"created_at"`
	ExpiresAt time.Time `json:"expires_at"` // runs created before this can use it; a run that waits keeps it longer

	// ZeroDataRetention: it is nowhere but in memory, and goes when no run waits for it any more that was created with it.
	ZeroDataRetention bool `json:"zero_data_retention"`
}

// Bounds of uploads that hold whatever a gateway is configured to.
const (
	MaxUploadBytes = MaxArtifactBytes // of one; Redis holds at most 512 MiB in one string
	MaxUploads     = 100_000          // of an organisation
)

// NewUpload is an upload that begins.
type NewUpload struct {
	Org               string
	Most              int64         // bytes that it may have, which are counted to the organisation until it is whole
	ZeroDataRetention bool          // see Upload
	Life              time.Duration // of the whole upload
	IdempotencyKey    string        // the same content with the same key is the same upload as long as that lives; empty: none

	// What the organisation may have, together with this one.
	MostBytes int64
	MostCount int
}

// uploadPause is how long an upload may pause between two pieces before it is gone. Who receives it has shorter limits; this
// removes what a gateway leaves that is gone itself.
const uploadPause = 2 * time.Minute

var (
	uploadScript, uploadKeepScript, uploadDropScript = loadScript("upload"), loadScript("uploadkeep"), loadScript("uploaddrop")
	uploadPutScript, uploadFreeScript                = loadLax("uploadput"), loadScript("uploadfree")
)

// UploadsFullError is ErrUploadsFull with when there may be room.
type UploadsFullError struct {
	RetryAfter time.Duration // until the first of them expires; 0: not known
}

// Error says what is full.
func (e *UploadsFullError) Error() string { return ErrUploadsFull.Error() }

// Unwrap is ErrUploadsFull.
func (e *UploadsFullError) Unwrap() error { return ErrUploadsFull }

// UploadWriter stores an upload piece by piece; no run can use it before Commit. Use one at a time.
type UploadWriter struct {
	store *Store
	new   NewUpload
	id    UploadID
	sum   hash.Hash
	size  int64
}

// BeginUpload begins an upload. Errors: ErrNotFound (no such organisation), an *UploadsFullError, ErrRange, ErrStorageFull, ErrUnavailable.
//
// Script upload.lua.
func (s *Store) BeginUpload(ctx context.Context, n NewUpload) (*UploadWriter, error) {
	fail := func(err error) (*UploadWriter, error) {
		return nil, fmt.Errorf("begin upload for organisation %.64s: %w", n.Org, err)
	}
	switch {
	case !validOrg(n.Org):
		return fail(ErrNotFound)
	case n.Most < 0 || n.Most > MaxUploadBytes || n.MostCount < 0 || n.MostCount > MaxUploads || n.MostBytes < 0:
		return fail(fmt.Errorf("%d bytes of %d in %d uploads: %w", n.Most, n.MostBytes, n.MostCount, ErrRange))
	case n.Life < time.Second || n.Life > maxRetentionSeconds*time.Second:
		return fail(fmt.Errorf("life of %v: %w", n.Life, ErrRange))
	}
	if err := s.Full(); err != nil {
		return fail(err)
	}
	u, err := uuid.NewV7FromReader(rand.Reader)
	if err != nil {
		return fail(fmt.Errorf("make id: %w", err))
	}
	w := &UploadWriter{store: s, new: n, id: UploadID("upl_" + strings.ReplaceAll(u.String(), "-", "")), sum: sha256.New()}
	r, err := s.eval(ctx, uploadScript, []string{s.keys.upload(string(w.id)), s.keys.org(n.Org)},
		string(w.id), n.Org, n.Most, flag(n.ZeroDataRetention), s.micros(), uploadPause.Milliseconds(), n.MostBytes, n.MostCount)
	if err != nil {
		return fail(err)
	}
	if r.code() == "FULLUP" {
		ms, err := r.int(1)
		if err != nil {
			return fail(err)
		}
		return fail(&UploadsFullError{RetryAfter: time.Duration(max(ms, 0)) * time.Millisecond})
	}
	if err := refused(r); err != nil {
		return fail(err)
	}
	return w, nil
}

// Write adds a piece, best of 256 KiB. Errors: ErrRange (it is larger than announced), ErrNotFound (it paused too long),
// ErrStorageFull, ErrUnavailable: the same bytes may be written again.
//
// Script uploadput.lua.
func (w *UploadWriter) Write(ctx context.Context, p []byte) error {
	if len(p) == 0 {
		return nil
	}
	s, id := w.store, string(w.id)
	if err := s.Full(); err != nil {
		return fmt.Errorf("write to upload %s: %w", id, err)
	}
	r, err := s.eval(ctx, uploadPutScript, []string{s.keys.upload(id), s.keys.uploadContent(id)},
		w.size, p, uploadPause.Milliseconds(), s.micros(), id)
	if err == nil {
		err = refused(r)
	}
	if err != nil {
		return fmt.Errorf("store piece of %s: %w", w.id, err)
	}
	w.sum.Write(p)
	w.size += int64(len(p))
	return nil
}

// SHA256 is the digest of what was written so far.
func (w *UploadWriter) SHA256() []byte { return w.sum.Sum(nil) }

// Size is how many bytes were written so far.
func (w *UploadWriter) Size() int64 { return w.size }

// Commit makes the upload whole. With an idempotency key that made the same upload, which is still there, it is that one, replayed, and
// this one is gone. Errors: ErrIdempotencyConflict (the key made another one), ErrNotFound (it paused too long), ErrUpload (the store
// has lost a part of it), ErrUnavailable: it may be repeated.
//
// Script uploadkeep.lua.
func (w *UploadWriter) Commit(ctx context.Context) (u Upload, replayed bool, err error) {
	s, id := w.store, string(w.id)
	r, err := s.eval(ctx, uploadKeepScript,
		[]string{s.keys.upload(id), s.keys.uploadContent(id), s.keys.uploaded(w.new.Org, w.new.IdempotencyKey)},
		id, w.size, hex.EncodeToString(w.SHA256()), s.micros(), w.new.Life.Milliseconds(), flag(w.new.ZeroDataRetention), flag(w.new.IdempotencyKey != ""))
	if err == nil && r.code() == "SHORT" {
		err = ErrUpload
	}
	if err == nil {
		err = refused(r, "REPLAY")
	}
	if err == nil {
		u, err = decodeUpload(r.text(1), r[2:])
	}
	if err != nil {
		return Upload{}, false, fmt.Errorf("complete %s: %w", w.id, err)
	}
	return u, r.code() == "REPLAY", nil
}

// Abort removes an upload that is not whole; again changes nothing.
//
// Script uploaddrop.lua.
func (w *UploadWriter) Abort(ctx context.Context) error {
	err := w.store.dropUpload(ctx, w.new.Org, w.id, "open")
	if err != nil && !errors.Is(err, ErrNotFound) {
		return fmt.Errorf("abort: %w", err)
	}
	return nil
}

// decodeUpload reads 'size', 'sha256', 'created_us', 'expires_us' and 'zdr' of an upload's record.
func decodeUpload(id string, v reply) (Upload, error) {
	size, err1 := v.int(0)
	created, err2 := v.int(2)
	expires, err3 := v.int(3)
	if err := errors.Join(err1, err2, err3); err != nil {
		return Upload{}, fmt.Errorf("record of %s: %w", id, err)
	}
	return Upload{ID: UploadID(id), Size: size, SHA256: v.text(1), CreatedAt: time.UnixMicro(created).UTC(),
		ExpiresAt: time.UnixMicro(expires).UTC(), ZeroDataRetention: v.text(4) == "1"}, nil
}
