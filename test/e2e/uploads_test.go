package e2e

import (
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/ephemeral-run/ephemeral/client"
	"github.com/ephemeral-run/ephemeral/run"
	"github.com/ephemeral-run/ephemeral/run/redisserver"
)

// TestUploads gives two runs a file of 20 MiB that was uploaded once: it arrives intact, with its mode, beside files of the
// request.
func TestUploads(t *testing.T) {
	t.Parallel()
	n := shared.tenant(t, 1_000_000)
	content := make([]byte, 20<<20)
	rand.Read(content)
	u, err := n.Upload(t.Context(), bytes.NewReader(content), client.UploadOptions{})
	if err != nil {
		t.Fatal(err)
	}
	empty, err := n.Upload(t.Context(), strings.NewReader(""), client.UploadOptions{})
	if err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(content)
	want := fmt.Sprintf("%s  in/big\n640 %d\n644 0\ninline\n", hex.EncodeToString(sum[:]), len(content))
	for range 2 {
		r := n.finish(t, client.Request{Command: "sha256sum in/big; stat -c '%a %s' in/big empty; cat in/small",
			Files: []run.File{{Path: "in/big", Upload: u.ID, Mode: "0640"}, {Path: "in/small", Content: "inline\n"}, {Path: "empty", Upload: empty.ID}}})
		if r.State != run.Succeeded || string(bytesOf(t, r.Result.Stdout)) != want {
			t.Errorf("ended %s, %+v:\n%s%s\nwant\n%s", r.State, r.Error, bytesOf(t, r.Result.Stdout), bytesOf(t, r.Result.Stderr), want)
		}
		if f := r.Request.Files[0]; f.Upload != u.ID || f.Content != "" {
			t.Errorf("the record has %.100v", f)
		}
		checkRecord(t, r)
		checkMoney(t, r, r.Money.Reserved)
	}
	if err := n.DeleteUpload(t.Context(), u.ID); err != nil {
		t.Error(err)
	}
	_, err = n.CreateRun(t.Context(), client.Request{Command: "true", Files: []run.File{{Path: "x", Upload: u.ID}}}, client.CreateOptions{})
	if p := problem(err); p == nil || p.Code != "unknown_upload" || p.Errors[0].Field != "files[0].upload" {
		t.Errorf("with an upload that is gone: %v", err)
	}
}

// TestDamagedUploadCostsNothing: an upload that is not what it was when the run was admitted ends the run before anything is
// charged.
func TestDamagedUploadCostsNothing(t *testing.T) {
	t.Parallel()
	n := shared.tenant(t, 1_000_000)
	u, err := n.Upload(t.Context(), strings.NewReader(strings.Repeat("x", 1_000_000)), client.UploadOptions{})
	if err != nil {
		t.Fatal(err)
	}
	url, err := redisserver.Find(n.server.data + "/redis")
	if err != nil {
		t.Fatal(err)
	}
	o, err := redis.ParseURL(url)
	if err != nil {
		t.Fatal(err)
	}
	rdb := redis.NewClient(o)
	defer rdb.Close()
	if err := rdb.SetRange(t.Context(), "{c0}:upload:"+string(u.ID)+":content", 999_999, "y").Err(); err != nil {
		t.Fatal(err)
	}
	r := n.finish(t, client.Request{Command: "true", Files: []run.File{{Path: "x", Upload: u.ID}}})
	if r.State != run.Failed || r.Error == nil || r.Error.Code != "upload_lost" || r.Money.Charged != 0 || r.Usage.ShellCommands != 0 {
		t.Errorf("ended %s, %+v, charged %d", r.State, r.Error, r.Money.Charged)
	}
	a, err := n.Account(t.Context())
	if err != nil || a.Available != 1_000_000 {
		t.Errorf("%+v, %v", a, err)
	}
	checkRecord(t, r)
	checkMoney(t, r, r.Money.Reserved)
}

// TestRunWithFiles: the command line sends small files along and uploads large ones.
func TestRunWithFiles(t *testing.T) {
	t.Parallel()
	n := shared.tenant(t, 1_000_000)
	dir := t.TempDir()
	large := make([]byte, 3<<20)
	rand.Read(large)
	for name, content := range map[string][]byte{"large": large, "text": []byte("text\n"), "bytes": {0xff, 0}} {
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o640); err != nil {
			t.Fatal(err)
		}
	}
	args := []string{"run", "--command", "sha256sum in/large; stat -c '%a %s' in/large text bytes; cat text", "--wait", "--output", "json",
		"--idempotency-key", "with-files", "--with", dir + "/large=in/large", "--with", dir + "/text", "--with", dir + "/bytes"}
	sum := sha256.Sum256(large)
	want := hex.EncodeToString(sum[:]) + "  in/large\n640 3145728\n640 5\n640 2\ntext\n"
	var ids []run.ID
	for range 2 {
		out, errs, err := n.server.cli(t.Context(), []string{"EPHEMERAL_API_KEY=" + n.key, "EPHEMERAL_URL=http://" + n.server.listen}, args...)
		var r run.Run
		if err != nil || json.Unmarshal([]byte(out), &r) != nil || r.Result == nil || string(bytesOf(t, r.Result.Stdout)) != want {
			t.Fatalf("%v\n%s%s", err, out, errs)
		}
		if f := r.Request.Files; f[0].Upload == "" || f[1].Upload != "" || f[2].Encoding != "base64" {
			t.Errorf("sent as %.200v", f)
		}
		ids = append(ids, r.ID)
	}
	if ids[0] != ids[1] {
		t.Errorf("the same key made %v", ids)
	}
	_, errs, err := n.server.cli(t.Context(), []string{"EPHEMERAL_API_KEY=" + n.key}, "run", "--command", "true", "--with", dir)
	if err == nil || !strings.Contains(errs, "is a directory") {
		t.Errorf("a directory: %v, %s", err, errs)
	}
}
