package main

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"unicode/utf8"

	"github.com/ephemeral-run/ephemeral/client"
	"github.com/ephemeral-run/ephemeral/run"
)

// Files up to inlineFile bytes travel in the request, as long as all of them together have at most inlineFiles.
const (
	inlineFile  = 1 << 20
	inlineFiles = 4 << 20
)

// withFiles adds files of this host to a request. Each is FILE or FILE=PATH. Large ones are uploaded, with keys made of the run's
// so that a repetition uploads nothing new.
func withFiles(ctx context.Context, c *client.Client, body json.RawMessage, with []string, key string) (json.RawMessage, error) {
	if len(with) == 0 {
		return body, nil
	}
	var request map[string]json.RawMessage
	var given struct {
		Files             []json.RawMessage `json:"files"`
		ZeroDataRetention bool              `json:"zero_data_retention"`
	}
	if err := json.Unmarshal(body, &request); err != nil {
		return nil, fmt.Errorf("add files to the request: %w", err)
	}
	if err := json.Unmarshal(body, &given); err != nil {
		return nil, fmt.Errorf("add files to the request: %w", err)
	}
	inline := 0
	for _, w := range with {
		name, path, named := strings.Cut(w, "=")
		if !named {
			path = filepath.Base(name)
		}
		o := client.UploadOptions{ZeroDataRetention: given.ZeroDataRetention}
		if key != "" {
			sum := sha256.Sum256([]byte(key + "\x00" + path))
			o.IdempotencyKey = hex.EncodeToString(sum[:])
		}
		f, err := withFile(ctx, c, name, path, &inline, o)
		if err != nil {
			return nil, fmt.Errorf("--with %s: %w", w, err)
		}
		given.Files = append(given.Files, f)
	}
	files, err := json.Marshal(given.Files)
	if err != nil {
		return nil, fmt.Errorf("encode files: %w", err)
	}
	request["files"] = files
	whole, err := json.Marshal(request)
	if err != nil {
		return nil, fmt.Errorf("encode request: %w", err)
	}
	return whole, nil
}

// withFile makes one file of a request, and uploads it if it is large. inline counts the bytes of those that are not.
func withFile(ctx context.Context, c *client.Client, name, path string, inline *int, o client.UploadOptions) (json.RawMessage, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if info.IsDir() {
		return nil, fmt.Errorf("%s is a directory", name)
	}
	file := map[string]string{"path": path}
	if info.Mode().IsRegular() {
		file["mode"] = fmt.Sprintf("%04o", info.Mode().Perm())
	}
	start, err := io.ReadAll(io.LimitReader(f, inlineFile+1)) // of a pipe the size is not known
	if err != nil {
		return nil, err
	}
	switch whole := len(start) <= inlineFile; {
	case whole && *inline+len(start) <= inlineFiles && utf8.Valid(start):
		*inline += len(start)
		file["content"] = string(start)
	case whole && *inline+len(start) <= inlineFiles:
		*inline += len(start)
		file["content"], file["encoding"] = base64.StdEncoding.EncodeToString(start), "base64"
	default:
		u, err := uploadRest(ctx, c, start, f, o)
		if err != nil {
			return nil, err
		}
		file["upload"] = string(u.ID)
	}
	return json.Marshal(file)
}

// uploadRest uploads a file of which the start was read already.
func uploadRest(ctx context.Context, c *client.Client, start []byte, f *os.File, o client.UploadOptions) (run.Upload, error) {
	if _, err := f.Seek(0, io.SeekStart); err == nil {
		return c.Upload(ctx, f, o)
	}
	return c.Upload(ctx, io.MultiReader(strings.NewReader(string(start)), f), o)
}
