package e2e

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/ephemeral-run/ephemeral/client"
	"github.com/ephemeral-run/ephemeral/run"
	"github.com/ephemeral-run/ephemeral/run/redisserver"
)

// TestFilesIn gives a run files of all kinds.
func TestFilesIn(t *testing.T) {
	t.Parallel()
	n := shared.tenant(t, 1_000_000)
	r := n.finish(t, client.Request{
		Command: `./a/b/run.sh; stat -c '%a %s' 'a/b/run.sh' secret -- '-rf' "\"'\$x" '日本 €'`,
		Files: []run.File{
			{Path: "a/b/run.sh", Content: "#!/bin/sh\necho ran\n", Mode: "0755"}, {Path: "secret", Content: "x", Mode: "0600"},
			{Path: "-rf", Content: "AA==", Encoding: "base64"}, {Path: `"'$x`}, {Path: "日本 €", Content: "€"},
		},
	})
	want := "ran\n755 19\n600 1\n644 1\n644 0\n644 3\n"
	if r.State != run.Succeeded || string(bytesOf(t, r.Result.Stdout)) != want {
		t.Errorf("ended %s, %+v:\n%s%s\nwant\n%s", r.State, r.Error, bytesOf(t, r.Result.Stdout), bytesOf(t, r.Result.Stderr), want)
	}
}

// TestFilesOut has a run leave files of all kinds, the last of them just before its end.
func TestFilesOut(t *testing.T) {
	t.Parallel()
	n := shared.tenant(t, 1_000_000)
	r := n.finish(t, client.Request{Command: `cd out; touch empty; printf '\0' > nul; mkdir -p a/b; echo nested > a/b/c; echo odd > 'ü "n".txt'
printf x > "$(printf 'new\nline')"; ln -s /etc/passwd link; ln -s /etc links; mkfifo fifo; printf x > "$(printf '\377')"; chmod 600 nul
head -c 3000000 /dev/urandom > big; sha256sum big | cut -c1-64 >&2`})
	if r.State != run.Succeeded || r.Files == nil {
		t.Fatalf("ended %s, %+v, files %+v", r.State, r.Error, r.Files)
	}
	list, err := n.Files(t.Context(), r.ID)
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]string{}
	for _, f := range list {
		got[f.Path] = fmt.Sprintf("%s %d %s", f.Mode, f.Size, f.SHA256)
	}
	sum := func(s string) string { b := sha256.Sum256([]byte(s)); return hex.EncodeToString(b[:]) }
	want := map[string]string{"empty": "0644 0 " + sum(""), "nul": "0600 1 " + sum("\x00"), "a/b/c": "0644 7 " + sum("nested\n"),
		"ü \"n\".txt": "0644 4 " + sum("odd\n"), "new\nline": "0644 1 " + sum("x"), "big": "0644 3000000 " + strings.TrimSpace(string(bytesOf(t, r.Result.Stderr)))}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
	if d := cmp.Diff(&run.Files{Count: 6, Bytes: 3_000_013, Skipped: 4}, r.Files); d != "" {
		t.Error(d)
	}
	var told *run.FilesData
	for _, e := range n.events(t, r.ID) {
		if d, ok := e.Data.(run.FilesData); ok {
			told = &d
		}
	}
	if told == nil || len(told.Names) != 6 || told.Names[0].Path != "a/b/c" {
		t.Errorf("event %+v", told)
	}
	dir := filepath.Join(t.TempDir(), "down")
	out, errs, err := n.server.cli(t.Context(), []string{"EPHEMERAL_API_KEY=" + n.key}, "runs", "download", string(r.ID), "--dir", dir)
	if err != nil || !strings.Contains(out, `"new\nline"`) {
		t.Errorf("download: %v\n%s%s", err, out, errs)
	}
	if b, err := os.ReadFile(filepath.Join(dir, "a/b/c")); err != nil || string(b) != "nested\n" {
		t.Errorf("%q, %v", b, err)
	}
	checkRecord(t, r)
	checkMoney(t, r, r.Money.Reserved)
}

// TestFilesBeforeTheEnd: 500 files, of which the last are written within the last moments, are all there.
func TestFilesBeforeTheEnd(t *testing.T) {
	t.Parallel()
	n := shared.tenant(t, 1_000_000)
	r := n.finish(t, client.Request{TimeoutSeconds: 80, Command: `python3 -c '
import os
for i in range(500):
    with open(f"out/{i}", "w") as f: f.write(str(i) * 100)
os._exit(7)'`})
	if r.State != run.Succeeded || *r.Result.ExitCode != 7 || r.Files == nil || r.Files.Count != 500 {
		t.Fatalf("ended %s, %+v, files %+v", r.State, r.Error, r.Files)
	}
	dir := t.TempDir()
	if _, err := n.DownloadAll(t.Context(), r.ID, dir); err != nil {
		t.Fatal(err)
	}
	for i := range 500 {
		if b, err := os.ReadFile(filepath.Join(dir, fmt.Sprint(i))); err != nil || string(b) != strings.Repeat(fmt.Sprint(i), 100) {
			t.Fatalf("%d: %q, %v", i, b, err)
		}
	}
}

// TestTooManyFiles: what does not fit is lost, the run is none the worse, and says so.
func TestTooManyFiles(t *testing.T) {
	t.Parallel()
	n := shared.tenant(t, 1_000_000)
	r := n.finish(t, client.Request{TimeoutSeconds: 80, Command: `python3 -c '
for i in range(100_000): open(f"out/{i}", "w").close()'`})
	if r.State != run.Succeeded || r.Files == nil || r.Files.Count != 1000 || !r.Files.Truncated || r.Files.Error != "" {
		t.Errorf("ended %s, %+v, files %+v", r.State, r.Error, r.Files)
	}
	r = n.finish(t, client.Request{TimeoutSeconds: 80, Command: `head -c 17000000 /dev/zero > out/large; echo x > out/small`})
	if r.State != run.Succeeded || r.Files == nil || r.Files.Count != 1 || !r.Files.Truncated {
		t.Errorf("ended %s, %+v, files %+v", r.State, r.Error, r.Files)
	}
	for _, c := range []string{`rmdir out; ln -s /etc out`, `rm -r out`, `true`} {
		if r = n.finish(t, client.Request{Command: c}); r.State != run.Succeeded || r.Files != nil {
			t.Errorf("%s: ended %s, %+v, files %+v", c, r.State, r.Error, r.Files)
		}
	}
}

// TestFailedUploadCostsNothing: a file that the machine does not take ends the run before anything is charged. The request
// goes past the gateway, which would refuse it.
func TestFailedUploadCostsNothing(t *testing.T) {
	t.Parallel()
	n := shared.tenant(t, 1_000_000)
	url, err := redisserver.Find(n.server.data + "/redis")
	if err != nil {
		t.Fatal(err)
	}
	store, err := run.Open(t.Context(), run.Config{RedisURL: url})
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	admitted, _, err := store.Admit(t.Context(), run.Admission{Org: n.org, FirstSlice: 200, Spec: run.Spec{
		Command: "echo ran", Shell: true, TimeoutSeconds: 30, MaxCostMicros: 10_000,
		Files: []run.File{{Path: "good", Content: "x"}, {Path: "../bad", Content: "x"}},
	}})
	if err != nil {
		t.Fatal(err)
	}
	r := n.ended(t, admitted.ID)
	if r.State != run.Failed || r.Error == nil || r.Error.Code != "files_failed" || r.Money.Charged != 0 || r.Money.Released != 10_000 || r.Result != nil {
		t.Errorf("ended %s, %+v, money %+v, result %+v", r.State, r.Error, r.Money, r.Result)
	}
	account, err := n.Account(t.Context())
	if err != nil || account.Balance != 1_000_000 || account.Held != 0 {
		t.Errorf("%+v, %v", account, err)
	}
}

// TestFilesUnderZeroDataRetention: none are collected.
func TestFilesUnderZeroDataRetention(t *testing.T) {
	t.Parallel()
	n := shared.tenant(t, 1_000_000)
	r := n.finish(t, client.Request{Command: `echo x > out/a`, ZeroDataRetention: true})
	list, err := n.Files(t.Context(), r.ID)
	if r.State != run.Succeeded || r.Files != nil || err != nil || len(list) != 0 {
		t.Errorf("ended %s, files %+v, %v, %v", r.State, r.Files, list, err)
	}
}
