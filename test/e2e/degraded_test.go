package e2e

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/ephemeral-run/ephemeral/client"
	"github.com/ephemeral-run/ephemeral/images"
	"github.com/ephemeral-run/ephemeral/run"
)

// TestServesWithoutATemplate starts a server whose image has a kernel that cannot boot. It must say so, keep answering and
// accept runs; and carry those out when the image has been mended, with no restart.
func TestServesWithoutATemplate(t *testing.T) {
	dir, err := os.MkdirTemp("", "eph-e2e-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o711); err != nil { // machines run as other users, who have to pass through
		t.Fatal(err)
	}
	link := filepath.Join(dir, "base")
	whole := brokenImage(t, link)
	s, err := newServer(filepath.Join(dir, "data"), "EPHEMERAL_IMAGE_DIR="+dir, "EPHEMERAL_POOL_MIN_READY=1", "EPHEMERAL_POOL_MAX_READY=1")
	if err != nil {
		t.Fatal(err)
	}
	if err := s.begin(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.stop(); err != nil {
			t.Error(err)
		}
		if residue, err := s.residue(); err != nil || residue.Total() > 0 {
			t.Errorf("left behind: %+v, %v", residue, err)
		}
	})
	s.failing(t)
	tenant := s.tenant(t, 1_000_000)
	created, err := tenant.CreateRun(t.Context(), client.Request{Command: "echo mended"}, client.CreateOptions{})
	if err != nil {
		t.Fatalf("a run while there is no template: %v", err)
	}
	if got, err := tenant.Run(t.Context(), created.Run.ID); err != nil || got.State != run.Queued {
		t.Errorf("the run is %s, %v", got.State, err)
	}

	mended := link + "-mended"
	if err := os.Symlink(whole, mended); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(mended, link); err != nil {
		t.Fatal(err)
	}
	if err := s.ready(); err != nil {
		t.Fatal(err)
	}
	if got := tenant.ended(t, created.Run.ID); got.State != run.Succeeded {
		t.Errorf("the run ended %s: %+v", got.State, got.Error)
	}
}

// failing waits until the server tells that the making of a template has failed: clients, that and when to come again;
// operators, why.
func (s *server) failing(t *testing.T) {
	t.Helper()
	var shown, after string
	for deadline := time.Now().Add(startLimit); time.Now().Before(deadline); time.Sleep(100 * time.Millisecond) {
		resp, err := checked(t).Get("http://" + s.listen + "/readyz")
		if err != nil {
			continue
		}
		resp.Body.Close()
		if resp.StatusCode == http.StatusOK {
			t.Fatal("ready with a kernel that cannot boot")
		}
		after = resp.Header.Get("Retry-After")
		shown, _, _ = s.cli(t.Context(), nil, "pool", "show", "--output", "json")
		if after != "" && strings.Contains(shown, "cannot be made") {
			return
		}
	}
	t.Fatalf("not told why it is not ready (Retry-After %q):\n%s\n%s", after, shown, s.log)
}

// changedImage makes a copy of the tests' image in dir that has some files changed and fits its manifest, and tells where the
// original is.
func changedImage(t *testing.T, dir string, change map[string]func(old []byte) []byte) (original string) {
	t.Helper()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	from := os.Getenv("EPHEMERAL_TEST_IMAGE")
	if from == "" {
		from = "../../build/images/base"
	}
	original, err := filepath.Abs(from)
	must(err)
	original, err = filepath.EvalSymlinks(original)
	must(err)
	must(os.Mkdir(dir, 0o755))
	manifest, err := images.ReadManifest(original)
	must(err)
	digest := sha256.New()
	for _, name := range []string{"vmlinuz", "initramfs", "rootfs.erofs"} {
		content, err := os.ReadFile(filepath.Join(original, name))
		must(err)
		file := manifest.Files[name]
		if f := change[name]; f != nil {
			content = f(content)
			file.SHA256, file.Size = fmt.Sprintf("%x", sha256.Sum256(content)), int64(len(content))
			manifest.Files[name] = file
		}
		must(os.WriteFile(filepath.Join(dir, name), content, 0o644))
		fmt.Fprintf(digest, "%s  %s\n", file.SHA256, name)
	}
	manifest.Digest = fmt.Sprintf("sha256:%x", digest.Sum(nil))
	content, err := json.Marshal(manifest)
	must(err)
	must(os.WriteFile(filepath.Join(dir, "manifest.json"), content, 0o644))
	_, err = images.Open(dir)
	must(err)
	return original
}
