package gateway

import (
	"context"
	"crypto/subtle"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"mime"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/gofiber/fiber/v2"

	"github.com/ephemeral-run/ephemeral/run"
)

// uploadPiece is how many bytes of an upload are in memory at once.
const uploadPiece = 256 << 10

// headerContentDigest is the digest of the body (RFC 9530).
const headerContentDigest = "Content-Digest"

// createUpload answers POST /v1/uploads: it hands the body on to the store piece by piece. What does not arrive whole and as
// announced is removed.
func (s *Server) createUpload(ctx context.Context, c *fiber.Ctx, key run.Key) error {
	n, digest, err := s.newUpload(c, key)
	if err != nil {
		return err
	}
	if err := s.receiving.Acquire(ctx, 1); err != nil {
		return problem(CodeUnavailable, "Too many uploads are being received.").because(err)
	}
	defer s.receiving.Release(1)
	w, err := s.deps.Store.BeginUpload(s.deadline(), n)
	if err != nil {
		return err
	}
	kept := false
	defer func() {
		if kept {
			return
		}
		if err := w.Abort(s.deadline()); err != nil { // it expires
			s.log.Warn("upload not removed", "request_id", requestID(c), "error", err)
		}
	}()
	if err := s.receive(c, w); err != nil {
		return err
	}
	if digest != nil && subtle.ConstantTimeCompare(digest, w.SHA256()) != 1 {
		return problem(CodeDigestMismatch, "", FieldError{headerContentDigest, "is not the SHA-256 of the body"})
	}
	u, replayed, err := w.Commit(s.deadline())
	if err != nil {
		return uploadBroken(err)
	}
	kept = true
	if replayed {
		c.Set(headerIdempotencyReplay, "true")
	}
	setHeader(c, fiber.HeaderLocation, "/v1/uploads/"+string(u.ID))
	return sendJSON(c, http.StatusCreated, u)
}

// newUpload reads the request before its body. digest is nil unless the client gave one.
func (s *Server) newUpload(c *fiber.Ctx, key run.Key) (n run.NewUpload, digest []byte, err error) {
	cfg := s.cfg.Uploads
	n = run.NewUpload{Org: key.Org, Most: cfg.Limit, Life: cfg.Life, MostBytes: cfg.Bytes, MostCount: cfg.Count}
	if err := onlyParameters(c, "zero_data_retention"); err != nil {
		return n, nil, err
	}
	switch v := c.Query("zero_data_retention"); v {
	case "true":
		n.ZeroDataRetention = true
	case "", "false":
	default:
		return n, nil, problem(CodeInvalidParameter, "", FieldError{"zero_data_retention", "must be true or false"})
	}
	if n.IdempotencyKey, err = idempotencyKey(headerValues(c, headerIdempotencyKey)); err != nil {
		return n, nil, err
	}
	if err := checkBytes(c); err != nil {
		return n, nil, err
	}
	if digest, err = contentDigest(headerValues(c, headerContentDigest)); err != nil {
		return n, nil, err
	}
	size := int64(c.Request().Header.ContentLength()) // negative: chunked
	if size > cfg.Limit {
		return n, nil, problem(CodeBodyTooLarge, fmt.Sprintf("The upload has %d bytes, at most %d are allowed.", size, cfg.Limit))
	}
	if size >= 0 {
		n.Most = size
	}
	return n, digest, nil
}

// checkBytes demands a body of bytes as they are.
func checkBytes(c *fiber.Ctx) error {
	mediaType, _, err := mime.ParseMediaType(c.Get(fiber.HeaderContentType))
	if err != nil || mediaType != fiber.MIMEOctetStream {
		return problem(CodeUnsupportedMediaType, "", FieldError{fiber.HeaderContentType, "must be " + fiber.MIMEOctetStream})
	}
	if enc := c.Get(fiber.HeaderContentEncoding); enc != "" && !strings.EqualFold(enc, "identity") {
		return problem(CodeUnsupportedMediaType, "", FieldError{fiber.HeaderContentEncoding, "must not be used"})
	}
	return nil
}

// contentDigest reads the SHA-256 of Content-Digest headers (RFC 9530): a dictionary of structured fields with byte sequences, such
// as sha-256=:base64:. Other digests are passed over, beside that one. No header gives nil.
func contentDigest(values []string) ([]byte, error) {
	if len(values) == 0 {
		return nil, nil
	}
	var digest []byte
	for member := range strings.SplitSeq(strings.Join(values, ","), ",") {
		name, value, _ := strings.Cut(strings.Trim(member, " \t"), "=")
		if name != "sha-256" {
			continue
		}
		inner, opened := strings.CutPrefix(value, ":")
		inner, closed := strings.CutSuffix(inner, ":")
		sum, err := base64.StdEncoding.DecodeString(inner)
		if !opened || !closed || err != nil || len(sum) != 32 {
			return nil, problem(CodeInvalidParameter, "", FieldError{headerContentDigest, "must have a SHA-256 as sha-256=:base64:"})
		}
		digest = sum // the last of a name counts (RFC 9651, section 3.2)
	}
	if digest == nil {
		return nil, problem(CodeInvalidParameter, "", FieldError{headerContentDigest, "has no sha-256, the digest that can be checked"})
	}
	return digest, nil
}

// receive hands the body on to the store. The client has ReadTimeout for each piece, and the upload's time for all.
func (s *Server) receive(c *fiber.Ctx, w *run.UploadWriter) error {
	size, r := int64(c.Request().Header.ContentLength()), c.Request().BodyStream()
	if r == nil || size == 0 {
		return nil
	}
	nc, end := c.Context().Conn(), time.Now().Add(s.cfg.Uploads.Timeout)
	piece := make([]byte, uploadPiece)
	if size > 0 {
		piece = piece[:min(uploadPiece, size)]
	}
	for {
		until := time.Now().Add(s.cfg.ReadTimeout)
		if end.Before(until) {
			until = end
		}
		if err := nc.SetReadDeadline(until); err != nil {
			return bodyBroken(err)
		}
		n, err := fill(r, piece)
		callOf(c).bodyRead = errors.Is(err, io.EOF) // to its end, or to that of the connection
		if w.Size()+int64(n) > s.cfg.Uploads.Limit {
			return problem(CodeBodyTooLarge, fmt.Sprintf("The upload has more than %d bytes.", s.cfg.Uploads.Limit))
		}
		if err != nil && !errors.Is(err, io.EOF) {
			return bodyBroken(err)
		}
		if err := w.Write(s.deadline(), piece[:n]); err != nil {
			return uploadBroken(err)
		}
		switch {
		case size >= 0 && w.Size() == size:
			callOf(c).bodyRead = true
			return nil
		case err == nil:
		case size >= 0 || hungUp(nc):
			c.Context().SetConnectionClose()
			return bodyBroken(io.ErrUnexpectedEOF)
		default:
			return nil
		}
	}
}

// fill reads until the piece is full. Unlike io.ReadFull it leaves the error as it was: the end of the body is io.EOF, also after
// some bytes.
func fill(r io.Reader, piece []byte) (n int, err error) {
	for n < len(piece) && err == nil {
		var m int
		m, err = r.Read(piece[n:])
		n += m
	}
	return n, err
}

// bodyBroken is the problem of a body that cannot be read on.
func bodyBroken(err error) *Problem {
	var ne net.Error
	if errors.As(err, &ne) && ne.Timeout() {
		return problem(CodeRequestTimeout, "")
	}
	return problem(CodeBadRequest, "The request body could not be read to its end.").because(err)
}

// uploadBroken is the error of an upload that the store does not take any more.
func uploadBroken(err error) error {
	switch {
	case errors.Is(err, run.ErrNotFound):
		return problem(CodeRequestTimeout, "").because(err)
	case errors.Is(err, run.ErrUpload):
		return problem(CodeUnavailable, "The store has lost a part of the upload.").because(err)
	}
	return err
}

// uploadID reads the upload's id from the address.
func uploadID(c *fiber.Ctx) (run.UploadID, error) {
	if err := onlyParameters(c); err != nil {
		return "", err
	}
	return run.ParseUploadID(c.Params("id"))
}

// getUpload answers GET /v1/uploads/{id}.
func (s *Server) getUpload(ctx context.Context, c *fiber.Ctx, key run.Key) error {
	id, err := uploadID(c)
	if err != nil {
		return err
	}
	u, err := s.deps.Store.Upload(ctx, key.Org, id)
	if err != nil {
		return err
	}
	return sendJSON(c, http.StatusOK, u)
}

// deleteUpload answers DELETE /v1/uploads/{id}.
func (s *Server) deleteUpload(ctx context.Context, c *fiber.Ctx, key run.Key) error {
	id, err := uploadID(c)
	if err != nil {
		return err
	}
	err = s.deps.Store.DeleteUpload(ctx, key.Org, id)
	if errors.Is(err, run.ErrState) {
		return problem(CodeUploadInUse, "")
	}
	if err != nil {
		return err
	}
	return c.SendStatus(http.StatusNoContent)
}

// uploadGone says what is wrong with the id of an upload.
const uploadGone = "is not an upload of your organisation, or has expired"

// uploadProblem says which file of a run has an upload that it cannot have.
func uploadProblem(e *run.UploadError) *Problem {
	field := fmt.Sprintf("files[%d].upload", e.File)
	switch {
	case e.Total > 0:
		return problem(CodeInvalidRequest, "", FieldError{"files", fmt.Sprintf("have too many bytes together: the uploads alone have %d", e.Total)})
	case e.Retained:
		return problem(CodeInvalidRequest, "", FieldError{field, "is kept on disk: for a run with zero_data_retention, upload it with zero_data_retention too"})
	}
	return problem(CodeUnknownUpload, "", FieldError{field, uploadGone})
}

// uploadsFull tells when there will be room, where that is known.
func uploadsFull(err error) *Problem {
	p := problem(CodeUploadsFull, "")
	var full *run.UploadsFullError
	if errors.As(err, &full) {
		return p.after(full.RetryAfter)
	}
	return p
}
