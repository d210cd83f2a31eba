package gateway

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ephemeral-run/ephemeral/run"
)

// TestUploadsTakeBoundedMemory sends 50 uploads of 16 MiB at once, which stop for a while one MiB before their ends: then the gateway has
// one piece of each in memory, of the 800 MiB that are on their way. While they move, no more than a few pieces are.
func TestUploadsTakeBoundedMemory(t *testing.T) {
	const uploads, size, stop = 50, 16 << 20, 15 << 20
	l := newLive(t, Config{ReadTimeout: time.Minute, StoreTimeout: time.Minute, Uploads: UploadConfig{Bytes: uploads * size}})
	m := l.newMember("org_up", 0)
	block := bytes.Repeat([]byte("0123456789abcdef"), 1<<12) // 64 KiB, which all clients send again and again
	sum := sha256.New()
	for range size / len(block) {
		sum.Write(block)
	}
	want := hex.EncodeToString(sum.Sum(nil))
	write := func(c net.Conn, bytes int) error {
		for range bytes / len(block) {
			if _, err := c.Write(block); err != nil {
				return err
			}
		}
		return nil
	}

	before := settledHeap(t)
	var most atomic.Int64
	watched, unwatch := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(watched)
		for {
			var s runtime.MemStats
			runtime.ReadMemStats(&s)
			most.Store(max(most.Load(), int64(s.HeapInuse)))
			select {
			case <-unwatch:
				return
			case <-time.After(20 * time.Millisecond):
			}
		}
	}()
	var all, stopped sync.WaitGroup
	goOn := make(chan struct{})
	stopped.Add(uploads)
	for range uploads {
		all.Go(func() {
			c, err := net.Dial("tcp", l.addr)
			if err != nil {
				t.Error(err)
				stopped.Done()
				return
			}
			defer c.Close()
			fmt.Fprintf(c, "POST /v1/uploads?zero_data_retention=true HTTP/1.1\r\nHost: x\r\nContent-Type: application/octet-stream\r\n"+
				"Authorization: Bearer %s\r\nContent-Length: %d\r\n\r\n", m.secret, size)
			err = write(c, stop)
			stopped.Done()
			<-goOn
			if err = errors.Join(err, write(c, size-stop)); err != nil {
				t.Error(err)
				return
			}
			resp, err := http.ReadResponse(bufio.NewReader(c), nil)
			if err != nil {
				t.Error(err)
				return
			}
			defer resp.Body.Close()
			var u run.Upload
			if err := json.NewDecoder(resp.Body).Decode(&u); err != nil || resp.StatusCode != 201 || u.Size != size || u.SHA256 != want {
				t.Errorf("%d %+v, %v", resp.StatusCode, u, err)
				return
			}
			if err := l.store.DeleteUpload(l.ctx, m.org, u.ID); err != nil {
				t.Error(err)
			}
		})
	}
	stopped.Wait()
	grown := settledHeap(t) - before
	close(goOn)
	all.Wait()
	close(unwatch)
	<-watched
	t.Logf("at rest the heap grew by %.1f MiB, at most %.1f MiB were in use of it while %d MiB moved",
		float64(grown)/(1<<20), float64(most.Load())/(1<<20), uploads*size>>20)
	if limit := int64(uploads*(uploadPiece+128<<10) + 8<<20); grown > limit {
		t.Errorf("at rest the heap grew by %d KiB, want at most %d", grown>>10, limit>>10)
	}
	if limit := int64(64 << 20); most.Load() > limit {
		t.Errorf("%d MiB of heap were in use, want at most %d", most.Load()>>20, limit>>20)
	}
	if keys := l.uploadKeys(); len(keys) > 0 {
		t.Errorf("left: %v", keys)
	}
}
