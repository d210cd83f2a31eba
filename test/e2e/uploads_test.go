package e2e

import (
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
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
