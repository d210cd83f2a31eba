package client

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/url"
	"os"
	"path"
	"strconv"

	"github.com/ephemeral-run/ephemeral/run"
)

// ErrChecksum says that a file did not arrive as the run left it.
var ErrChecksum = errors.New("the file's checksum is another")

// Files returns the files that an ended run left in out/ of its working directory, by path.
func (c *Client) Files(ctx context.Context, id run.ID) ([]run.Artifact, error) {
	var l struct {
		Files []run.Artifact `json:"files"`
	}
	err := c.call(ctx, request{method: http.MethodGet, path: runPath(id) + "/files", repeat: true}, &l)
	return l.Files, err
}

// Download writes the content of a file that the run left to w, and checks it. It is sent once: what was written when it
// fails is to be thrown away. ErrChecksum.
func (c *Client) Download(ctx context.Context, id run.ID, file run.Artifact, w io.Writer) error {
	if err := c.download(ctx, id, file, w); err != nil {
		return fmt.Errorf("download %q of %s: %w", file.Path, id, err)
	}
	return nil
}

func (c *Client) download(ctx context.Context, id run.ID, file run.Artifact, w io.Writer) error {
	req, err := c.newRequest(ctx, request{
		method: http.MethodGet, path: runPath(id) + "/files/" + url.PathEscape(file.Path), header: map[string]string{"Accept": "*/*"},
	})
	if err != nil {
		return err
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return noAnswer(ctx, err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return readProblem(resp)
	}
	sum := sha256.New()
	from := &source{r: resp.Body}
	n, err := io.Copy(io.MultiWriter(w, sum), io.LimitReader(from, file.Size+1))
	switch {
	case from.err != nil:
		return noAnswer(ctx, from.err)
	case err != nil:
		return err
	case n != file.Size || hex.EncodeToString(sum.Sum(nil)) != file.SHA256:
		return fmt.Errorf("%d bytes, want %d: %w", n, file.Size, ErrChecksum)
	}
	return nil
}

// source remembers why it could not be read, to tell that from a failure of the writer.
type source struct {
	r   io.Reader
	err error
}

func (s *source) Read(p []byte) (int, error) {
	n, err := s.r.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		s.err = err
	}
	return n, err
}

// DownloadAll writes all files that the run left below dir, which must exist, and returns them. The paths were chosen by
// the run: they lead nowhere else than below dir. A file appears whole or not at all, and replaces one of that name. A
// download that breaks off is repeated as other calls are.
func (c *Client) DownloadAll(ctx context.Context, id run.ID, dir string) ([]run.Artifact, error) {
	files, err := c.Files(ctx, id)
	if err != nil {
		return nil, err
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, fmt.Errorf("download files of %s: %w", id, err)
	}
	defer root.Close()
	for _, file := range files {
		b := c.newBackoff()
		for {
			err := c.save(ctx, id, file, root)
			if err == nil {
				break
			}
			if !temporary(err) || !b.sleep(ctx, err) {
				return nil, err
			}
		}
	}
	return files, nil
}

// save downloads one file into the directory.
func (c *Client) save(ctx context.Context, id run.ID, file run.Artifact, root *os.Root) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("save %q: %w", file.Path, err)
		}
	}()
	mode, err := strconv.ParseUint(file.Mode, 8, 32)
	if err != nil {
		return fmt.Errorf("mode: %w", err)
	}
	if parent := path.Dir(file.Path); parent != "." {
		if err := root.MkdirAll(parent, 0o755); err != nil {
			return err
		}
	}
	draft := path.Join(path.Dir(file.Path), ".ephemeral-"+file.SHA256[:min(16, len(file.SHA256))])
	f, err := root.OpenFile(draft, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	err = errors.Join(c.Download(ctx, id, file, f), f.Chmod(fs.FileMode(mode&0o777|0o600)), f.Close())
	if err == nil {
		err = root.Rename(draft, file.Path)
	}
	if err != nil {
		return errors.Join(err, root.Remove(draft))
	}
	return nil
}
