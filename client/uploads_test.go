package client

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/iotest"
	"time"

	"github.com/ephemeral-run/ephemeral/run"
)

const testUpload = run.UploadID("upl_00000000000000000000000000000001")

// keep answers as a server does that keeps the upload.
func keep(w http.ResponseWriter, body []byte) {
	sum := sha256.Sum256(body)
	w.WriteHeader(http.StatusCreated)
	_ = json.NewEncoder(w).Encode(run.Upload{ID: testUpload, Size: int64(len(body)), SHA256: hex.EncodeToString(sum[:])})
}

// TestUploadIsSentAgain: a file that can be read again is, with the same key; a stream is sent once.
func TestUploadIsSentAgain(t *testing.T) {
	content := bytes.Repeat([]byte("0123456789"), 100_000)
	sum := sha256.Sum256(content)
	digest := "sha-256=:" + base64.StdEncoding.EncodeToString(sum[:]) + ":"
	var mu sync.Mutex
	var keys, lengths, digests []string
	c := against(t, func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		keys, digests = append(keys, r.Header.Get("Idempotency-Key")), append(digests, r.Header.Get("Content-Digest"))
		lengths = append(lengths, fmt.Sprint(r.ContentLength))
		switch len(keys) % 3 {
		case 1:
			refuse(w, 503, "unavailable") // before the body was read
		case 2:
			_, _ = io.CopyN(io.Discard, r.Body, 1000)
			panic(http.ErrAbortHandler)
		default:
			body, _ := io.ReadAll(r.Body)
			if r.URL.RawQuery != "zero_data_retention=true" || r.Header.Get("Content-Type") != "application/octet-stream" || !bytes.Equal(body, content) {
				t.Errorf("%s, %s, %d bytes", r.URL, r.Header.Get("Content-Type"), len(body))
			}
			keep(w, body)
		}
	})
	c.delay = time.Millisecond
	from := bytes.NewReader(append([]byte("before"), content...))
	if _, err := from.Seek(6, io.SeekStart); err != nil {
		t.Fatal(err)
	}
	u, err := c.Upload(t.Context(), from, UploadOptions{ZeroDataRetention: true})
	if err != nil || u.ID != testUpload || u.Size != 1_000_000 {
		t.Fatalf("%+v, %v", u, err)
	}
	for i := range 3 {
		if keys[i] != keys[0] || keys[i] == "" || digests[i] != digest || lengths[i] != "1000000" {
			t.Errorf("attempt %d: %s, %s, %s", i, keys[i], digests[i], lengths[i])
		}
	}
	var p *Problem
	if _, err := c.Upload(t.Context(), io.MultiReader(bytes.NewReader(content)), UploadOptions{}); !errors.As(err, &p) || p.Status != 503 || len(keys) != 4 {
		t.Errorf("a stream: %v after %d attempts", err, len(keys))
	}
	if digests[3] != "" || lengths[3] != "-1" {
		t.Errorf("a stream: %s, %s", digests[3], lengths[3])
	}
}

func TestUploadThatFails(t *testing.T) {
	deleted := false
	c := against(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodDelete {
			deleted = r.URL.Path == "/v1/uploads/"+string(testUpload)
			w.WriteHeader(http.StatusNoContent)
			return
		}
		body, err := io.ReadAll(r.Body)
		if err != nil {
			return
		}
		keep(w, append(body, 'x')) // which is not what was sent
	})
	broken := errors.New("broken disk")
	if _, err := c.Upload(t.Context(), iotest.ErrReader(broken), UploadOptions{}); !errors.Is(err, broken) {
		t.Errorf("a reader that fails: %v", err)
	}
	if deleted {
		t.Error("deleted")
	}
	for _, r := range []io.Reader{strings.NewReader("content"), io.MultiReader(strings.NewReader("content"))} {
		deleted = false
		if _, err := c.Upload(t.Context(), r, UploadOptions{}); !errors.Is(err, ErrChecksum) || !deleted {
			t.Errorf("another content arrived: %v, deleted %v", err, deleted)
		}
	}
}

// TestRequestsNameUploads: a file is sent with its content, also an empty one, or with its upload.
func TestRequestsNameUploads(t *testing.T) {
	b, err := json.Marshal(Request{Command: "true", Files: []run.File{{Path: "a"}, {Path: "b", Upload: testUpload, Mode: "0755"}}})
	want := `{"command":"true","files":[{"path":"a","content":""},{"path":"b","upload":"` + string(testUpload) + `","mode":"0755"}]}`
	if err != nil || string(b) != want {
		t.Errorf("%s, %v", b, err)
	}
	if b, err := json.Marshal(Request{Prompt: "x"}); err != nil || string(b) != `{"prompt":"x"}` {
		t.Errorf("%s, %v", b, err)
	}
}
