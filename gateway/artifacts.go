package gateway

import (
	"context"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"path"
	"strings"

	"github.com/gofiber/fiber/v2"

	"github.com/ephemeral-run/ephemeral/run"
)

// artifactPiece is how many bytes of an artifact one reader has in memory.
const artifactPiece = 256 << 10

// artifactList is the body of GET /v1/runs/{id}/files.
type artifactList struct {
	Files []run.Artifact `json:"files"`
}

// listArtifacts answers GET /v1/runs/{id}/files.
func (s *Server) listArtifacts(ctx context.Context, c *fiber.Ctx, key run.Key) error {
	if err := onlyParameters(c); err != nil {
		return err
	}
	id, err := runID(c)
	if err != nil {
		return err
	}
	list, err := s.deps.Store.ListArtifacts(ctx, key.Org, id)
	if err != nil {
		return err
	}
	return sendJSON(c, http.StatusOK, artifactList{Files: nonNil(list)})
}

// getArtifact answers GET /v1/runs/{id}/files/{path}. What is in the file was chosen by untrusted code: a browser must save
// it and never show it, run it or guess what it is.
func (s *Server) getArtifact(ctx context.Context, c *fiber.Ctx, key run.Key) error {
	if err := onlyParameters(c); err != nil {
		return err
	}
	id, err := runID(c)
	if err != nil {
		return err
	}
	name, err := url.PathUnescape(c.Params("*"))
	if err != nil {
		return problem(CodeInvalidParameter, "", FieldError{"path", "is not percent-encoded"})
	}
	list, err := s.deps.Store.ListArtifacts(ctx, key.Org, id)
	if err != nil {
		return err
	}
	for _, a := range list {
		if a.Path == name {
			return s.sendArtifact(c, id, a)
		}
	}
	return problem(CodeNotFound, "The run left no file of this path.")
}

func (s *Server) sendArtifact(c *fiber.Ctx, id run.ID, a run.Artifact) error {
	sum, err := hex.DecodeString(a.SHA256)
	if err != nil {
		return fmt.Errorf("checksum of an artifact of %s: %w", id, err)
	}
	etag := `"` + a.SHA256 + `"`
	c.Set(fiber.HeaderETag, etag)
	c.Set("Repr-Digest", "sha-256=:"+base64.StdEncoding.EncodeToString(sum)+":") // RFC 9530
	if c.Get(fiber.HeaderIfNoneMatch) == etag {
		return c.SendStatus(http.StatusNotModified)
	}
	c.Set(fiber.HeaderContentType, artifactType(a.Path))
	c.Set(fiber.HeaderContentDisposition, attachment(path.Base(a.Path)))
	c.Set(fiber.HeaderContentSecurityPolicy, "default-src 'none'; sandbox")
	k := callOf(c)
	if c.Method() == http.MethodHead || a.Size == 0 {
		c.Response().SkipBody = true
		c.Response().Header.SetContentLength(int(a.Size))
		return nil
	}
	k.streaming = true
	boundSendBuffer(c.Context().Conn())
	c.Context().SetBodyStream(&artifactReader{server: s, call: k, id: id, artifact: a}, int(a.Size))
	return nil
}

// artifactReader reads an artifact from the store piece by piece.
type artifactReader struct {
	server   *Server
	call     *call
	id       run.ID
	artifact run.Artifact
	at       int64  // of the next piece
	rest     []byte // of this one
}

// Read reads on. An error ends the connection, so that the client sees that it does not have everything.
func (r *artifactReader) Read(p []byte) (int, error) {
	if len(r.rest) == 0 {
		ctx := r.server.deadline()
		piece, err := r.server.deps.Store.ReadArtifact(ctx, r.id, r.artifact, r.at, artifactPiece)
		if err != nil {
			r.server.log.Warn("file cut short", "request_id", r.call.id, "run", r.id, "error", err)
			return 0, err
		}
		if len(piece) == 0 {
			return 0, io.EOF
		}
		r.at += int64(len(piece))
		r.rest = piece
	}
	n := copy(p, r.rest)
	r.rest = r.rest[n:]
	return n, nil
}

// Close is called when the answer is sent, or the client gone.
func (r *artifactReader) Close() error {
	end := "finished"
	if sent := r.at - int64(len(r.rest)); sent < r.artifact.Size {
		end = errGone.Error()
	}
	r.server.observe(r.call, http.StatusOK, int(r.at)-len(r.rest), end)
	return nil
}

// artifactTypes are the media types that no browser runs, by extension. Anything else is bytes.
var artifactTypes = map[string]string{
	".txt": "text/plain; charset=utf-8", ".log": "text/plain; charset=utf-8", ".md": "text/plain; charset=utf-8",
	".csv": "text/csv; charset=utf-8", ".json": "application/json", ".png": "image/png", ".jpg": "image/jpeg",
	".jpeg": "image/jpeg", ".gif": "image/gif", ".webp": "image/webp", ".pdf": "application/pdf",
	".zip": "application/zip", ".gz": "application/gzip",
}

func artifactType(name string) string {
	if t, ok := artifactTypes[strings.ToLower(path.Ext(name))]; ok {
		return t
	}
	return fiber.MIMEOctetStream
}

// attachment is the Content-Disposition of a file to save (RFC 6266): the name in plain ASCII for old clients, and as it is
// (RFC 8187) where that is not the same.
func attachment(name string) string {
	plain := strings.Map(func(r rune) rune {
		if r < ' ' || r > '~' || strings.ContainsRune(`"\/%;`, r) {
			return '_'
		}
		return r
	}, name)
	header := `attachment; filename="` + plain + `"`
	if plain != name {
		header += "; filename*=UTF-8''" + extValue(name)
	}
	return header
}

// extValue encodes all but the attr-char of RFC 8187.
func extValue(s string) string {
	var b strings.Builder
	for i := range len(s) {
		c := s[i]
		switch {
		case c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z', c >= '0' && c <= '9', strings.IndexByte("!#$&+-.^_`|~", c) >= 0:
			b.WriteByte(c)
		default:
			fmt.Fprintf(&b, "%%%02X", c)
		}
	}
	return b.String()
}
