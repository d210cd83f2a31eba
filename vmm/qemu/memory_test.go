package qemu

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ephemeral-run/ephemeral/vmm"
)

func randomFile(t *testing.T, size int64) (string, []byte) {
	t.Helper()
	content, err := io.ReadAll(io.LimitReader(rand.NewChaCha8([32]byte{byte(size)}), size))
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "ram")
	if err := os.WriteFile(path, content, 0o444); err != nil {
		t.Fatal(err)
	}
	return path, content
}

func TestSealedMemoryIsACopyThatNobodyCanChange(t *testing.T) {
	path, content := randomFile(t, 3<<20+17)
	var cache sealedCache
	s, err := cache.acquire(context.Background(), path)
	if err != nil {
		t.Fatal(err)
	}
	// As QEMU opens it, for writing.
	f, err := os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", s.file.Fd()), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	if got, err := io.ReadAll(f); err != nil || !bytes.Equal(got, content) {
		t.Errorf("%d bytes differ from the file's, %v", len(got), err)
	}
	if _, err := f.WriteAt([]byte("x"), 0); !errors.Is(err, unix.EPERM) {
		t.Errorf("write: %v", err)
	}
	if err := f.Truncate(1); !errors.Is(err, unix.EPERM) {
		t.Errorf("truncate: %v", err)
	}
	if _, err := unix.Mmap(int(f.Fd()), 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); !errors.Is(err, unix.EPERM) {
		t.Errorf("shared mapping: %v", err)
	}
	private, err := unix.Mmap(int(f.Fd()), 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE)
	if err != nil {
		t.Fatalf("private mapping: %v", err)
	}
	private[0]++
	if err := unix.Munmap(private); err != nil {
		t.Error(err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil || st.Blocks*512 < int64(len(content)) {
		t.Errorf("the copy has holes: %d blocks, %v", st.Blocks, err)
	}
	if err := cache.close(); err == nil {
		t.Error("closed while in use")
	}
	cache.release(s)
	if err := cache.close(); err != nil {
		t.Error(err)
	}
}

func TestSealedCacheSharesAndKeepsOneIdle(t *testing.T) {
	ctx := context.Background()
	first, _ := randomFile(t, 1<<20)
	second, _ := randomFile(t, 2<<20)
	var cache sealedCache
	var wg sync.WaitGroup
	var mu sync.Mutex
	got := make(map[*sealed]int)
	for range 16 {
		wg.Go(func() {
			s, err := cache.acquire(ctx, first)
			if err != nil {
				t.Error(err)
				return
			}
			mu.Lock()
			got[s]++
			mu.Unlock()
		})
	}
	wg.Wait()
	if len(got) != 1 {
		t.Fatalf("%d copies of one memory", len(got))
	}
	for s, n := range got {
		for range n {
			cache.release(s)
		}
	}
	again, err := cache.acquire(ctx, first)
	if err != nil || got[again] == 0 {
		t.Errorf("an idle copy was not kept: %v", err)
	}
	other, err := cache.acquire(ctx, second)
	if err != nil {
		t.Fatal(err)
	}
	cache.release(again)
	cache.release(other)
	if len(cache.entries) != 1 || cache.entries[other.key] != other {
		t.Errorf("%d copies are kept idle", len(cache.entries))
	}
	if err := os.Remove(second); err != nil {
		t.Fatal(err)
	}
	if _, err := cache.acquire(ctx, second); !errors.Is(err, vmm.ErrTemplate) {
		t.Errorf("a removed memory: %v", err)
	}
	if err := cache.close(); err != nil {
		t.Error(err)
	}
}

func TestSealedCacheNoticesAnotherFile(t *testing.T) {
	path, _ := randomFile(t, 1<<20)
	var cache sealedCache
	a, err := cache.acquire(context.Background(), path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	want := bytes.Repeat([]byte{7}, 1<<20)
	if err := os.WriteFile(path, want, 0o444); err != nil {
		t.Fatal(err)
	}
	b, err := cache.acquire(context.Background(), path)
	if err != nil {
		t.Fatal(err)
	}
	got := make([]byte, len(want))
	if _, err := b.file.ReadAt(got, 0); err != nil || !bytes.Equal(got, want) {
		t.Errorf("the copy of the file that was there before: %v", err)
	}
	cache.release(a)
	cache.release(b)
	if err := cache.close(); err != nil {
		t.Error(err)
	}
}

func TestSealedCacheSurvivesACancelledMaker(t *testing.T) {
	path, _ := randomFile(t, 1<<20)
	var cache sealedCache
	cancelled, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := cache.acquire(cancelled, path); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
	if len(cache.entries) != 0 {
		t.Error("a failed copy is kept")
	}
	s, err := cache.acquire(context.Background(), path)
	if err != nil {
		t.Fatal(err)
	}
	cache.release(s)
	if err := cache.close(); err != nil {
		t.Error(err)
	}
}
