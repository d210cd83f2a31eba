package run

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"

	"github.com/redis/go-redis/v9"
)

// Upload returns an upload of the organisation. ErrNotFound: there is none, it is not whole, or it has expired.
func (s *Store) Upload(ctx context.Context, org string, id UploadID) (Upload, error) {
	u, err := s.findUpload(ctx, org, id)
	if err != nil {
		return Upload{}, fmt.Errorf("upload %.64s: %w", id, err)
	}
	return u, nil
}

func (s *Store) findUpload(ctx context.Context, org string, id UploadID) (Upload, error) {
	if !validUpload(string(id)) {
		return Upload{}, ErrNotFound
	}
	var record *redis.SliceCmd
	var content *redis.IntCmd
	err := s.pipelined(ctx, func(p redis.Pipeliner) {
		record = p.HMGet(ctx, s.keys.upload(string(id)), "size", "sha256", "created_us", "expires_us", "zdr", "org", "state")
		content = p.StrLen(ctx, s.keys.uploadContent(string(id)))
	})
	if err != nil {
		return Upload{}, err
	}
	v := reply(record.Val())
	if v.text(5) != org || v.text(6) != "whole" {
		return Upload{}, ErrNotFound
	}
	u, err := decodeUpload(string(id), v)
	if err != nil {
		return Upload{}, err
	}
	if content.Val() != u.Size {
		return Upload{}, ErrNotFound
	}
	return u, nil
}

// DeleteUpload removes an upload of the organisation, from the files of Redis as erased content is. ErrState: a run holds it
// that has not started; ErrNotFound as for Upload.
//
// Script uploaddrop.lua.
func (s *Store) DeleteUpload(ctx context.Context, org string, id UploadID) error {
	if !validUpload(string(id)) {
		return fmt.Errorf("delete upload %.64s: %w", id, ErrNotFound)
	}
	if err := s.dropUpload(ctx, org, id, "whole"); err != nil {
		return fmt.Errorf("delete upload: %w", err)
	}
	return nil
}

func (s *Store) dropUpload(ctx context.Context, org string, id UploadID, state string) error {
	r, err := s.eval(ctx, uploadDropScript, []string{s.keys.upload(string(id)), s.keys.holders(string(id))}, string(id), org, state)
	if err == nil {
		err = refused(r)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", id, err)
	}
	return nil
}

// FreeUploads tells that the run has its uploads: they need not be kept for it any more.
//
// Script uploadfree.lua.
func (s *Store) FreeUploads(ctx context.Context, l *Lease) error {
	r, err := s.eval(ctx, uploadFreeScript, []string{s.keys.run(string(l.Run))}, string(l.Run), l.Token, s.micros())
	if err == nil {
		err = refused(r)
	}
	if err != nil {
		return fmt.Errorf("free uploads of %s: %w", l.Run, err)
	}
	return nil
}

// uploadPiece is how many bytes of an upload a reader has in memory.
const uploadPiece = 256 << 10

// UploadReader reads an upload piece by piece and checks it: at its end comes ErrUpload instead of io.EOF unless size and
// SHA-256 are those of what was uploaded. After ErrUnavailable reading may go on.
type UploadReader struct {
	store *Store
	ctx   context.Context
	of    Upload
	sum   hash.Hash
	at    int64  // of the next piece
	rest  []byte // of this one
}

// OpenUpload opens an upload that the run uses. ErrUpload: it is gone.
func (s *Store) OpenUpload(ctx context.Context, l *Lease, id UploadID) (*UploadReader, error) {
	u, err := s.findUpload(ctx, l.Org, id)
	if errors.Is(err, ErrNotFound) {
		err = ErrUpload
	}
	if err != nil {
		return nil, fmt.Errorf("open upload %.64s of %s: %w", id, l.Run, err)
	}
	return &UploadReader{store: s, ctx: ctx, of: u, sum: sha256.New()}, nil
}

// Read implements io.Reader.
func (r *UploadReader) Read(p []byte) (int, error) {
	if len(r.rest) == 0 && r.at < r.of.Size {
		if err := r.next(); err != nil {
			return 0, fmt.Errorf("read %s: %w", r.of.ID, err)
		}
	}
	if len(r.rest) == 0 {
		if hex.EncodeToString(r.sum.Sum(nil)) != r.of.SHA256 {
			return 0, fmt.Errorf("checksum of %s: %w", r.of.ID, ErrUpload)
		}
		return 0, io.EOF
	}
	n := copy(p, r.rest)
	r.rest = r.rest[n:]
	return n, nil
}

// next reads the next piece.
func (r *UploadReader) next() error {
	n := min(uploadPiece, r.of.Size-r.at)
	b, err := r.store.rdb.GetRange(r.ctx, r.store.keys.uploadContent(string(r.of.ID)), r.at, r.at+n-1).Bytes()
	switch {
	case err != nil && !errors.Is(err, redis.Nil):
		return unavailable(err)
	case int64(len(b)) != n:
		return ErrUpload
	}
	r.sum.Write(b)
	r.at, r.rest = r.at+n, b
	return nil
}

// UploadError says which file of a request names an upload that it cannot have. It is ErrUpload.
type UploadError struct {
	File     int   // index among the request's files
	Retained bool  // it is kept on disk, which a run under zero data retention must not use
	Total    int64 // bytes of all uploads, where they are more than they may be; 0: they are not
}

// Error says what is wrong.
func (e *UploadError) Error() string {
	switch {
	case e.Total > 0:
		return fmt.Sprintf("uploads of %d bytes are too large together", e.Total)
	case e.Retained:
		return fmt.Sprintf("file %d: the upload is not under zero data retention", e.File)
	}
	return fmt.Sprintf("file %d: no such upload", e.File)
}

// Unwrap is ErrUpload.
func (e *UploadError) Unwrap() error { return ErrUpload }

// withUploads adds to the arguments of admit.lua what it needs of a run with uploads.
func (a Admission) withUploads(args []any) []any {
	first := true
	for _, f := range a.Spec.Files {
		if f.Upload == "" {
			continue
		}
		if first {
			args, first = append(args, a.UploadBytes), false
		}
		args = append(args, string(f.Upload))
	}
	return args
}

// uploadError is the error of an answer of admit.lua about uploads.
func (a Admission) uploadError(r reply) error {
	n, err := r.int(1)
	if err != nil {
		return err
	}
	if r.code() == "SIZE" {
		return &UploadError{Total: n}
	}
	e := &UploadError{Retained: r.code() == "RETAINED"}
	for i, f := range a.Spec.Files {
		if f.Upload == "" {
			continue
		}
		if n--; n == 0 {
			e.File = i
		}
	}
	return e
}
