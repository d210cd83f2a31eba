package client

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"net/http"
	"net/url"
	"sync"

	"github.com/ephemeral-run/ephemeral/run"
)

// UploadOptions say how a file is uploaded.
type UploadOptions struct {
	// ZeroDataRetention is needed for runs with it: the upload is only in memory, and erased when they have it.
	ZeroDataRetention bool
	IdempotencyKey    string // 1 to 255 visible ASCII characters; empty: a fresh one
}

// Upload sends a file ahead of the runs that use it: name it by its id in Request.Files. The file is read as it is sent, and
// ErrChecksum is returned where it did not arrive as it was read. An io.Seeker is read twice, so that the server can check its
// digest before it keeps anything, and sent again where that may help, as other calls are; any other reader is sent once.
func (c *Client) Upload(ctx context.Context, r io.Reader, o UploadOptions) (run.Upload, error) {
	u, err := c.upload(ctx, r, o)
	if err != nil {
		return run.Upload{}, fmt.Errorf("upload: %w", err)
	}
	return u, nil
}

func (c *Client) upload(ctx context.Context, r io.Reader, o UploadOptions) (run.Upload, error) {
	if o.IdempotencyKey == "" {
		o.IdempotencyKey = rand.Text()
	}
	f := sending{from: r, size: -1}
	if s, ok := r.(io.Seeker); ok {
		if err := f.measure(s); err != nil {
			return run.Upload{}, fmt.Errorf("read the file: %w", err)
		}
	}
	b := c.newBackoff()
	for {
		u, err := c.send(ctx, &f, o)
		if err == nil || f.seek == nil || !temporary(err) || !b.sleep(ctx, err) {
			return u, err
		}
		if _, err := f.seek.Seek(f.start, io.SeekStart); err != nil {
			return run.Upload{}, fmt.Errorf("go back to the file's begin: %w", err)
		}
	}
}

// sending is a file on its way.
type sending struct {
	from   io.Reader
	seek   io.Seeker // nil: it can be sent once
	start  int64
	size   int64  // -1: not known
	digest []byte // nil: not known
}

// measure reads the file to its end and returns to where it began.
func (f *sending) measure(s io.Seeker) error {
	start, err := s.Seek(0, io.SeekCurrent)
	if err != nil {
		return nil // a pipe, though it has the method
	}
	sum := sha256.New()
	size, err := io.Copy(sum, f.from)
	if err != nil {
		return err
	}
	if _, err := s.Seek(start, io.SeekStart); err != nil {
		return err
	}
	f.seek, f.start, f.size, f.digest = s, start, size, sum.Sum(nil)
	return nil
}

// send uploads the file once.
func (c *Client) send(ctx context.Context, f *sending, o UploadOptions) (run.Upload, error) {
	header := map[string]string{"Idempotency-Key": quote(o.IdempotencyKey), "Content-Type": "application/octet-stream"}
	if f.digest != nil {
		header["Content-Digest"] = "sha-256=:" + base64.StdEncoding.EncodeToString(f.digest) + ":"
	}
	r := request{method: http.MethodPost, path: "/v1/uploads", header: header, query: url.Values{}}
	if o.ZeroDataRetention {
		r.query.Set("zero_data_retention", "true")
	}
	req, err := c.newRequest(ctx, r)
	if err != nil {
		return run.Upload{}, err
	}
	out := &outgoing{from: f.from, sum: sha256.New()}
	if f.size != 0 {
		req.Body, req.ContentLength = out, f.size
	}
	resp, err := c.http.Do(req)
	sum, broken := out.end(f.seek != nil)
	if broken != nil {
		if resp != nil {
			_ = resp.Body.Close()
		}
		return run.Upload{}, fmt.Errorf("read the file: %w", broken)
	}
	if err != nil {
		return run.Upload{}, noAnswer(ctx, err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusCreated {
		return run.Upload{}, readProblem(resp)
	}
	var u run.Upload
	if err := json.NewDecoder(io.LimitReader(resp.Body, 1<<20)).Decode(&u); err != nil {
		return run.Upload{}, noAnswer(ctx, fmt.Errorf("read answer: %w", err))
	}
	if u.SHA256 != hex.EncodeToString(sum) {
		err := fmt.Errorf("%d bytes arrived as %s: %w", u.Size, u.ID, ErrChecksum)
		return run.Upload{}, errors.Join(err, c.DeleteUpload(ctx, u.ID))
	}
	return u, nil
}

// outgoing is the body of a request. The transport may go on reading it for a while when the answer is there.
type outgoing struct {
	mu   sync.Mutex
	from io.Reader
	sum  hash.Hash
	err  error // why the file could not be read
	over bool
}

// errOver ends the reading of a body whose answer is there.
var errOver = errors.New("the request is over")

// Read implements io.Reader.
func (o *outgoing) Read(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.over {
		return 0, errOver
	}
	n, err := o.from.Read(p)
	o.sum.Write(p[:n])
	if err != nil && !errors.Is(err, io.EOF) {
		o.err = err
	}
	return n, err
}

// Close implements io.Closer.
func (o *outgoing) Close() error { return nil }

// end ends the reading, and returns the digest of what was read and why it failed. With wait it waits for a read that goes on, so that
// the file can be read again; otherwise that one is not heard any more.
func (o *outgoing) end(wait bool) (sum []byte, err error) {
	if wait {
		o.mu.Lock()
	} else if !o.mu.TryLock() {
		return nil, nil
	}
	defer o.mu.Unlock()
	o.over = true
	return o.sum.Sum(nil), o.err
}

func uploadPath(id run.UploadID) string { return "/v1/uploads/" + url.PathEscape(string(id)) }

// GetUpload returns an upload.
func (c *Client) GetUpload(ctx context.Context, id run.UploadID) (run.Upload, error) {
	var u run.Upload
	err := c.call(ctx, request{method: http.MethodGet, path: uploadPath(id), repeat: true}, &u)
	return u, err
}

// DeleteUpload erases an upload that no run waits for.
func (c *Client) DeleteUpload(ctx context.Context, id run.UploadID) error {
	return c.call(ctx, request{method: http.MethodDelete, path: uploadPath(id), repeat: true}, nil)
}
