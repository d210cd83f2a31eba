package run

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"path"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/redis/go-redis/v9"
)

// Artifact is a file that a run left in out/ of its working directory.
type Artifact struct {
	Path   string `json:"path"` // relative to out/, UTF-8; anything else may be in it
	Size   int64  `json:"size"`
	SHA256 string `json:"sha256"` // of the content, hexadecimal
	Mode   string `json:"mode"`   // permission bits, octal, e.g. "0644"

	Offset int64 `json:"-"` // where its content begins in the store; of use to ReadArtifact alone
}

// Files tells what a run left. Under zero data retention nothing is collected.
type Files struct {
	Count     int    `json:"count"`
	Bytes     int64  `json:"bytes"`
	Skipped   int64  `json:"skipped,omitempty"`   // links, devices, pipes, sockets, names that are not UTF-8 or too long
	Truncated bool   `json:"truncated,omitempty"` // there were files beyond the limits, which are lost
	Error     string `json:"error,omitempty"`     // why the files could not be collected: agent_lost, store_unavailable
}

// Bounds of artifacts that hold whatever a node is configured to.
const (
	MaxArtifacts     = 10_000
	MaxArtifactBytes = 256 << 20 // of one run; Redis holds at most 512 MiB in one string
	MaxArtifactPath  = 512
	maxArtifactDepth = 33
)

// storedArtifact is an Artifact as the store keeps it.
type storedArtifact struct {
	Artifact
	Start int64 `json:"offset"`
}

// ArtifactWriter stores the files of one run piece by piece; nobody sees them before Commit. Use one at a time.
type ArtifactWriter struct {
	store *Store
	lease *Lease
	list  []storedArtifact
	seen  map[string]bool
	sum   hash.Hash
	piece []byte // not yet stored
	at    int64  // where in the content the piece belongs
}

// Artifacts begins to store the files that a run left. Under zero data retention there must be none.
func (s *Store) Artifacts(l *Lease) *ArtifactWriter {
	return &ArtifactWriter{store: s, lease: l, seen: map[string]bool{}, sum: sha256.New()}
}

// Begin begins a file; Write adds to it. ErrRange: no path, one that was there, or too many files.
func (w *ArtifactWriter) Begin(name string, mode uint32) error {
	w.end()
	switch {
	case !artifactPath(name):
		return fmt.Errorf("artifact %.100q: not a plain relative path: %w", name, ErrRange)
	case w.seen[name]:
		return fmt.Errorf("artifact %.100q: is there twice: %w", name, ErrRange)
	case len(w.list) == MaxArtifacts:
		return fmt.Errorf("more than %d artifacts: %w", MaxArtifacts, ErrRange)
	case w.lease.Spec.ZeroDataRetention:
		return fmt.Errorf("artifact under zero data retention: %w", ErrRange)
	}
	w.seen[name] = true
	w.list = append(w.list, storedArtifact{
		Artifact: Artifact{Path: name, Mode: fmt.Sprintf("%04o", mode&0o777)}, Start: w.at + int64(len(w.piece)),
	})
	return nil
}

// artifactPath says whether a path is relative, plain, not too long and not too deep. The guest chose it.
func artifactPath(p string) bool {
	return p != "" && len(p) <= MaxArtifactPath && utf8.ValidString(p) && !strings.ContainsRune(p, 0) && p[0] != '/' &&
		path.Clean(p) == p && p != "." && p != ".." && !strings.HasPrefix(p, "../") && strings.Count(p, "/") < maxArtifactDepth
}

// end completes the file begun last.
func (w *ArtifactWriter) end() {
	if len(w.list) > 0 {
		w.list[len(w.list)-1].SHA256 = hex.EncodeToString(w.sum.Sum(nil))
	}
	w.sum.Reset()
}

// Write adds to the file begun last. ErrRange: the files are too large together; ErrLeaseLost; ErrUnavailable: the same
// bytes may be written again.
func (w *ArtifactWriter) Write(ctx context.Context, p []byte) error {
	if len(w.list) == 0 {
		return fmt.Errorf("content of no artifact: %w", ErrRange)
	}
	if w.at+int64(len(w.piece)+len(p)) > MaxArtifactBytes {
		return fmt.Errorf("artifacts of more than %d bytes: %w", MaxArtifactBytes, ErrRange)
	}
	if len(w.piece)+len(p) > pieceBytes {
		if err := w.flush(ctx); err != nil {
			return err
		}
	}
	w.piece = append(w.piece, p...)
	w.sum.Write(p)
	w.list[len(w.list)-1].Size += int64(len(p))
	return nil
}

func (w *ArtifactWriter) flush(ctx context.Context) error {
	if len(w.piece) == 0 {
		return nil
	}
	if err := w.store.putPiece(ctx, w.lease, w.store.keys.content(string(w.lease.Run)), w.at, w.piece); err != nil {
		return fmt.Errorf("store artifacts of %s: %w", w.lease.Run, err)
	}
	w.at += int64(len(w.piece))
	w.piece = w.piece[:0]
	return nil
}

// Commit makes the files visible, and returns them by path. What is not settled within an hour vanishes. It may be
// repeated after ErrUnavailable.
func (w *ArtifactWriter) Commit(ctx context.Context) ([]Artifact, error) {
	w.end()
	if len(w.list) == 0 {
		return nil, nil
	}
	if err := w.flush(ctx); err != nil {
		return nil, err
	}
	slices.SortFunc(w.list, func(a, b storedArtifact) int { return strings.Compare(a.Path, b.Path) })
	raw, err := json.Marshal(w.list)
	if err != nil {
		return nil, fmt.Errorf("encode list of artifacts: %w", err)
	}
	name := w.store.keys.left(string(w.lease.Run))
	for at := 0; at < len(raw); at += pieceBytes {
		if err := w.store.putPiece(ctx, w.lease, name, int64(at), raw[at:min(at+pieceBytes, len(raw))]); err != nil {
			return nil, fmt.Errorf("store list of artifacts of %s: %w", w.lease.Run, err)
		}
	}
	list := make([]Artifact, len(w.list))
	for i, a := range w.list {
		list[i] = a.Artifact
	}
	return list, nil
}

// putPiece writes a piece of a stream of the run at its place. Script put.lua.
func (s *Store) putPiece(ctx context.Context, l *Lease, name string, at int64, piece []byte) error {
	r, err := s.eval(ctx, putScript, []string{s.keys.run(string(l.Run)), name}, l.Token, at, piece, putLife.Milliseconds())
	if err != nil {
		return err
	}
	return refused(r)
}

// ListArtifacts returns the files that an ended run left, by path; none before its end, when there are none, or when they
// were erased. ErrNotFound as for Get.
func (s *Store) ListArtifacts(ctx context.Context, org string, id ID) ([]Artifact, error) {
	owner, err := s.owner(ctx, org, id)
	if err != nil {
		return nil, fmt.Errorf("artifacts: %w", err)
	}
	var record *redis.MapStringStringCmd
	var left *redis.StringCmd
	err = s.pipelined(ctx, func(p redis.Pipeliner) {
		record, left = p.HGetAll(ctx, s.keys.run(string(id))), p.Get(ctx, s.keys.left(string(id)))
	})
	if err != nil {
		return nil, fmt.Errorf("artifacts of %s: %w", id, err)
	}
	f := record.Val()
	if len(f) == 0 || f["org"] != owner {
		return nil, fmt.Errorf("artifacts of %s: %w", id, ErrNotFound)
	}
	r, err := decodeRun(id, f)
	if err != nil {
		return nil, fmt.Errorf("artifacts: %w", err)
	}
	raw := left.Val()
	if r.Files == nil || r.Files.Count == 0 || raw == "" {
		return nil, nil
	}
	var stored []storedArtifact
	if err := json.Unmarshal([]byte(raw), &stored); err != nil {
		return nil, fmt.Errorf("list of artifacts of %s: %w", id, err)
	}
	list := make([]Artifact, len(stored))
	for i, a := range stored {
		list[i] = a.Artifact
		list[i].Offset = a.Start
	}
	return list, nil
}

// errGone says that an artifact was erased or has expired while it was read.
var errGone = errors.New("the artifact is gone")

// ReadArtifact returns at most n bytes of an artifact that ListArtifacts returned for the run, from offset at on; fewer
// only at its end.
func (s *Store) ReadArtifact(ctx context.Context, id ID, a Artifact, at int64, n int) ([]byte, error) {
	n = int(min(int64(n), a.Size-at))
	if at < 0 || n <= 0 {
		return nil, nil
	}
	from := a.Offset + at
	b, err := s.rdb.GetRange(ctx, s.keys.content(string(id)), from, from+int64(n)-1).Bytes()
	switch {
	case err != nil && !errors.Is(err, redis.Nil):
		return nil, fmt.Errorf("read artifact of %s: %w", id, unavailable(err))
	case len(b) != n:
		return nil, fmt.Errorf("read artifact of %s: %w", id, errGone)
	}
	return b, nil
}
