package e2e

import (
	"bytes"
	"crypto/rand"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/ephemeral-run/ephemeral/client"
	"github.com/ephemeral-run/ephemeral/run"
	"github.com/ephemeral-run/ephemeral/run/redisserver"
	"github.com/ephemeral-run/ephemeral/run/tracing/tracingtest"
)

// canary is a word that nobody else uses.
func canary(kind string) string { return "canary-" + kind + "-" + strings.ToLower(rand.Text()) }

// needles are the forms in which a word may stand somewhere.
func needles(words ...string) (all [][]byte) {
	for _, w := range words {
		all = append(all, []byte(w), []byte(hex.EncodeToString([]byte(w))))
		for shift := range 3 { // base64 depends on what stands before
			b := base64.StdEncoding.EncodeToString([]byte(strings.Repeat("x", shift) + w))
			all = append(all, []byte(b[4:len(b)-4]))
		}
	}
	return all
}

// holds tells which of the needles the text has, in pieces, so that a machine's memory can be searched.
func holds(r io.Reader, needles [][]byte) string {
	const piece, overlap = 4 << 20, 256
	buffer := make([]byte, 0, piece+overlap)
	for {
		n, err := io.ReadFull(r, buffer[len(buffer):len(buffer)+piece])
		buffer = buffer[:len(buffer)+n]
		for _, needle := range needles {
			if bytes.Contains(buffer, needle) {
				return string(needle)
			}
		}
		if err != nil {
			return ""
		}
		keep := min(overlap, len(buffer))
		buffer = append(buffer[:0], buffer[len(buffer)-keep:]...)
	}
}

// traces looks for words everywhere that a server could have left them: Redis' memory and files, the data directory, log,
// metrics. It returns the places.
func (s *server) traces(t *testing.T, words ...string) (places []string) {
	t.Helper()
	all := needles(words...)
	found := func(place string, r io.Reader) {
		if w := holds(r, all); w != "" {
			places = append(places, place+": "+w)
		}
	}
	url, err := redisserver.Find(s.data + "/redis")
	if err != nil {
		t.Fatal(err)
	}
	o, err := redis.ParseURL(url)
	if err != nil {
		t.Fatal(err)
	}
	rdb := redis.NewClient(o)
	defer rdb.Close()
	for keys := rdb.Scan(t.Context(), 0, "*", 1000).Iterator(); keys.Next(t.Context()); {
		key := keys.Val()
		found("key "+key, strings.NewReader(key+rdb.Dump(t.Context(), key).Val()+plain(t, rdb, key)))
	}
	err = filepath.WalkDir(s.data, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return nil // a rewrite, or a machine's end, removes files meanwhile
		}
		f, err := os.Open(path)
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		defer f.Close()
		found("file "+strings.TrimPrefix(path, s.data), f)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if s.collector != nil {
		found("traces", bytes.NewReader(s.collector.Bytes()))
	}
	found("log", strings.NewReader(s.cmd.Stderr.(*locked).String()))
	for _, e := range s.env {
		if address, ok := strings.CutPrefix(e, "EPHEMERAL_ADMIN_LISTEN="); ok {
			resp, err := http.Get("http://" + address + "/metrics")
			if err != nil {
				t.Fatal(err)
			}
			found("metrics", resp.Body)
			resp.Body.Close()
		}
	}
	return places
}

// plain is what a key holds, uncompressed.
func plain(t *testing.T, rdb *redis.Client, key string) string {
	t.Helper()
	ctx := t.Context()
	switch rdb.Type(ctx, key).Val() {
	case "string":
		return rdb.Get(ctx, key).Val()
	case "hash":
		var b strings.Builder
		for k, v := range rdb.HGetAll(ctx, key).Val() {
			b.WriteString(k + " " + v + "\n")
		}
		return b.String()
	case "list":
		return strings.Join(rdb.LRange(ctx, key, 0, -1).Val(), "\n")
	case "set":
		return strings.Join(rdb.SMembers(ctx, key).Val(), "\n")
	case "zset":
		return strings.Join(rdb.ZRange(ctx, key, 0, -1).Val(), "\n")
	}
	return ""
}

// TestCanaries runs work full of words that are found nowhere, while it is under way and afterwards, under zero data
// retention; and nowhere some time after it was deleted without that. The same search finds the words of a run that is
// kept.
func TestCanaries(t *testing.T) {
	collector := tracingtest.New(t)
	s := startOwn(t, "EPHEMERAL_LEASE=2s", "EPHEMERAL_POOL_MAX_MACHINES=2", "EPHEMERAL_LOG_FORMAT=json",
		"OTEL_EXPORTER_OTLP_ENDPOINT="+collector.URL, "OTEL_BSP_SCHEDULE_DELAY=200")
	s.collector = collector
	n := s.tenant(t, 1_000_000)
	in := func(command string, zdr bool) (client.Request, []string) {
		w := []string{canary("command"), canary("path"), canary("content"), canary("meta"), canary("output"), canary("left"), canary("uploaded")}
		u, err := n.Upload(t.Context(), strings.NewReader(strings.Repeat("x", 300_000)+w[6]), client.UploadOptions{ZeroDataRetention: zdr})
		if err != nil {
			t.Fatal(err)
		}
		split := len(w[4]) / 2 // so that the output's word is not in the command
		return client.Request{
			Command: "x=" + w[0] + "; printf %s " + w[4][:split] + "; echo " + w[4][split:] + "; cat " + w[1] + "; tail -c 60 uploaded; cp " + w[1] + " out/" + w[5] + "; " + command,
			Files:   []run.File{{Path: w[1], Content: w[2]}, {Path: "uploaded", Upload: u.ID}}, Metadata: map[string]string{"note": w[3]},
		}, w
	}

	t.Run("zero data retention", func(t *testing.T) {
		request, words := in("sleep 3", true)
		request.ZeroDataRetention = true
		created, err := n.CreateRun(t.Context(), request, client.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		seen := ""
		for e, err := range n.Events(t.Context(), created.Run.ID, 0) {
			if err != nil {
				t.Fatal(err)
			}
			if e.Type == run.EventWorkerStarted {
				time.Sleep(time.Second) // the command has written by now, and what was written is on the disk
				if places := s.traces(t, words...); len(places) > 0 {
					t.Errorf("while it runs: %q", places)
				}
			}
			if d, ok := e.Data.(run.ShellData); ok {
				seen = d.Output
			}
		}
		if !strings.Contains(seen, words[4]) || !strings.Contains(seen, words[2]) || !strings.Contains(seen, words[6]) {
			t.Errorf("a live reader saw the output %q", seen)
		}
		first := n.ended(t, created.Run.ID)
		if first.State != run.Succeeded || first.Money.Charged == 0 {
			t.Errorf("ended %s, %+v", first.State, first.Error)
		}
		prompt := canary("prompt")
		r := n.finish(t, client.Request{Prompt: prompt, ZeroDataRetention: true})
		if r.State != run.Succeeded || r.Usage.ModelCalls == 0 {
			t.Errorf("the prompt ended %s, %+v", r.State, r.Error)
		}
		checkTrace(t, collector, first)
		checkTrace(t, collector, r)
		time.Sleep(1200 * time.Millisecond) // the append-only file is written every second
		if places := s.traces(t, append(words, prompt)...); len(places) > 0 {
			t.Errorf("afterwards: %q", places)
		}
	})

	t.Run("deletion", func(t *testing.T) {
		request, words := in("true", false)
		r := n.finish(t, request)
		if r.State != run.Succeeded || r.Files == nil || r.Files.Count != 1 {
			t.Fatalf("ended %s, %+v, files %+v", r.State, r.Error, r.Files)
		}
		for _, w := range words {
			if len(s.traces(t, w)) == 0 {
				t.Errorf("the search does not find %s", w)
			}
		}
		if err := n.Delete(t.Context(), r.ID); err != nil {
			t.Fatal(err)
		}
		var places []string
		for end := time.Now().Add(45 * time.Second); time.Now().Before(end); time.Sleep(time.Second) {
			if places = s.traces(t, words...); len(places) == 0 {
				break
			}
		}
		if len(places) > 0 {
			t.Errorf("45 s after its deletion: %q", places)
		}
		if kept, err := n.Run(t.Context(), r.ID); err != nil || !kept.Erased || kept.Money != r.Money {
			t.Errorf("%+v, %v", kept, err)
		}
	})
}

// TestNoCoreFiles: neither a machine's process nor what it could leave is ever written as a core file.
func TestNoCoreFiles(t *testing.T) {
	t.Parallel()
	n := shared.tenant(t, 1_000_000)
	created, err := n.CreateRun(t.Context(), client.Request{Command: "sleep 1"}, client.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	n.until(t, created.Run.ID, run.EventWorkerStarted)
	limits, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	machines := 0
	for _, path := range limits {
		line, err := os.ReadFile(path)
		if err != nil || !bytes.Contains(line, []byte(shared.data)) || !bytes.Contains(line, []byte("qemu-system")) {
			continue
		}
		b, err := os.ReadFile(filepath.Join(filepath.Dir(path), "limits"))
		if err != nil {
			continue
		}
		for line := range strings.Lines(string(b)) {
			if f := strings.Fields(strings.TrimPrefix(line, "Max core file size")); strings.HasPrefix(line, "Max core file size") {
				machines++
				if f[0] != "0" || f[1] != "0" {
					t.Errorf("%s: %s", path, line)
				}
			}
		}
	}
	if machines == 0 {
		t.Error("no machine's process found")
	}
	n.ended(t, created.Run.ID)
}
