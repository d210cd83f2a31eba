package guest

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestFiles(t *testing.T) {
	m, scratch := prepared(t)
	large := bytes.Repeat([]byte("0123456789\x00"), 400_000)
	for name, content := range map[string][]byte{"empty": {}, "nul": {0}, "a/b/c/große Datei €": large, "a/b/other": []byte("x"), "-rf": []byte("y")} {
		if err := m.PutFile(ctx(t), name, 0o751, bytes.NewReader(content)); err != nil {
			t.Fatal(err)
		}
		info, err := os.Stat(filepath.Join(scratch, name))
		if err != nil || info.Mode() != 0o751 || info.Sys().(*syscall.Stat_t).Uid != 65534 {
			t.Errorf("%s: %v, %v", name, info, err)
		}
		var got bytes.Buffer
		if err := m.GetFile(ctx(t), name, int64(len(content)), &got); err != nil || !bytes.Equal(got.Bytes(), content) {
			t.Errorf("%s: %d bytes of %d, %v", name, got.Len(), len(content), err)
		}
	}
	if info, err := os.Stat(filepath.Join(scratch, "a/b")); err != nil || info.Sys().(*syscall.Stat_t).Uid != 65534 {
		t.Errorf("directory: %v, %v", info, err)
	}
	var got bytes.Buffer
	slow := writerFunc(func(p []byte) (int, error) {
		if got.Len() == 0 {
			time.Sleep(1500 * time.Millisecond)
		}
		return got.Write(p)
	})
	if err := m.GetFile(ctx(t), "a/b/c/große Datei €", int64(len(large)), slow); err != nil || got.Len() != len(large) {
		t.Errorf("slow writer: %d bytes, %v", got.Len(), err)
	}
}

func TestFilesRefused(t *testing.T) {
	m, scratch := prepared(t)
	secret := filepath.Join(t.TempDir(), "secret")
	must := func(err error) {
		if err != nil {
			t.Fatal(err)
		}
	}
	must(os.WriteFile(secret, []byte("secret"), 0o644))
	must(os.Symlink(secret, scratch+"/link"))
	must(os.Symlink(filepath.Dir(secret), scratch+"/dirlink"))
	must(os.Mkdir(scratch+"/dir", 0o755))
	must(os.WriteFile(scratch+"/file", []byte("0123456789"), 0o644))
	must(unix.Mkfifo(scratch+"/fifo", 0o666))
	large := bytes.NewReader(make([]byte, 5<<20))
	for _, path := range []string{"", "/etc/passwd", "../x", "a/../../x", "a//b", "a/", ".", "dirlink/x", "file/x", "dir", strings.Repeat("x", 300), strings.Repeat("x/", 3000) + "x"} {
		_, _ = large.Seek(0, io.SeekStart)
		if err := m.PutFile(ctx(t), path, 0, large); !errors.As(err, new(*RefusedError)) {
			t.Errorf("put %.40q: %v", path, err)
		}
	}
	for _, path := range []string{"", "/etc/passwd", "../x", "link", "dirlink/secret", "dir", "fifo", "none", "file/x"} {
		if err := m.GetFile(ctx(t), path, 100, io.Discard); !errors.As(err, new(*RefusedError)) {
			t.Errorf("get %.40q: %v", path, err)
		}
	}
	if err := m.GetFile(ctx(t), "file", 9, io.Discard); !errors.As(err, new(*RefusedError)) {
		t.Errorf("too large: %v", err)
	}
	// A link in the way of a file is replaced, not written through.
	must(m.PutFile(ctx(t), "link", 0, strings.NewReader("mine")))
	if content, err := os.ReadFile(secret); string(content) != "secret" || err != nil {
		t.Errorf("written through a link: %q, %v", content, err)
	}
	if err := m.PutFile(ctx(t), "broken", 0, failingReader{io.ErrClosedPipe}); !errors.Is(err, io.ErrClosedPipe) {
		t.Errorf("failing reader: %v", err)
	}
	time.Sleep(100 * time.Millisecond)
	if entries, err := os.ReadDir(scratch); err != nil || len(entries) != 6 {
		t.Errorf("left over: %v, %v", entries, err)
	}
}

func TestParallelFiles(t *testing.T) {
	m, scratch := prepared(t)
	var wg sync.WaitGroup
	for i := range 200 {
		wg.Go(func() {
			if err := m.PutFile(ctx(t), fmt.Sprintf("a/b/c/%d", i), 0, strings.NewReader(fmt.Sprint(i))); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if entries, err := os.ReadDir(scratch + "/a/b/c"); err != nil || len(entries) != 200 {
		t.Errorf("%d files, %v", len(entries), err)
	}
}
