package node

import (
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/ephemeral-run/ephemeral/node/guest"
	"github.com/ephemeral-run/ephemeral/run"
)

// ArtifactLimits bound what one run may leave in out/; what is beyond is lost, and the record says so.
type ArtifactLimits struct {
	Files int   `env:"EPHEMERAL_ARTIFACT_FILES" envDefault:"1000" help:"files that one run may leave in out/ (0: none are collected; at most 10000)"`
	Bytes int64 `env:"EPHEMERAL_ARTIFACT_BYTES" envDefault:"16777216" help:"bytes of all the files that one run leaves in out/; they are kept in Redis (at most 268435456)"`
}

// Check says what is wrong with the limits.
func (l ArtifactLimits) Check() error {
	if l.Files < 0 || l.Files > run.MaxArtifacts {
		return fmt.Errorf("EPHEMERAL_ARTIFACT_FILES is %d: want 0 to %d", l.Files, run.MaxArtifacts)
	}
	if l.Bytes < 0 || l.Bytes > run.MaxArtifactBytes {
		return fmt.Errorf("EPHEMERAL_ARTIFACT_BYTES is %d: want 0 to %d", l.Bytes, run.MaxArtifactBytes)
	}
	return nil
}

// collectTime bounds how long a machine is kept for its files.
const collectTime = 30 * time.Second

// errCollectTime ends a collection that takes longer.
var errCollectTime = errors.New("collecting took too long")

// maxNamed is how many files an event names.
const maxNamed = 100

// putFiles writes the request's files into the machine before the worker starts.
func (x *execution) putFiles(ctx context.Context) error {
	uploads := false
	for i, f := range x.lease.Spec.Files {
		r, err := x.openFile(ctx, f)
		if err != nil {
			return fmt.Errorf("file %d of the request: %w", i, err)
		}
		mode, err := fileMode(f.Mode)
		if err != nil {
			return fmt.Errorf("file %d of the request: %w", i, err)
		}
		if err := x.guest.PutFile(ctx, f.Path, mode, r); err != nil {
			return fmt.Errorf("put file %d of the request: %w", i, err)
		}
		uploads = uploads || f.Upload != ""
	}
	if !uploads {
		return nil
	}
	return insistently(ctx, func() error { return x.Store.FreeUploads(ctx, x.lease) })
}

// openFile gives the content of a file of the request.
func (x *execution) openFile(ctx context.Context, f run.File) (r io.Reader, err error) {
	switch {
	case f.Upload != "":
		var u *run.UploadReader
		err = insistently(ctx, func() error { u, err = x.Store.OpenUpload(ctx, x.lease, f.Upload); return err })
		return insistentReader{ctx, u}, err
	case f.Encoding == "base64":
		b, err := base64.StdEncoding.DecodeString(f.Content)
		return bytes.NewReader(b), err
	}
	return strings.NewReader(f.Content), nil
}

// insistentReader reads on when the store is there again.
type insistentReader struct {
	ctx context.Context
	r   io.Reader
}

func (r insistentReader) Read(p []byte) (n int, err error) {
	err = insistently(r.ctx, func() error { n, err = r.r.Read(p); return err })
	return n, err
}

// fileMode reads the permission bits of a file of the request; 0 stands for the default.
func fileMode(s string) (uint32, error) {
	if s == "" {
		return 0, nil
	}
	mode, err := strconv.ParseUint(s, 8, 32)
	if err != nil || mode > 0o777 {
		return 0, fmt.Errorf("mode %.10q", s)
	}
	return uint32(mode), nil
}

// collect stores what the worker left in out/, if it had one. Whatever happens here is told beside the outcome, and does
// not change it. Under zero data retention nothing is collected.
func (x *execution) collect(ctx context.Context) {
	if !x.worked || ctx.Err() != nil || x.lease.Spec.ZeroDataRetention || x.Artifacts.Files == 0 {
		return
	}
	x.begins("collect")
	defer x.line.stage("collect")
	ctx, cancel := context.WithTimeoutCause(ctx, collectTime, errCollectTime)
	defer cancel()
	files, named, err := x.takeFiles(ctx)
	if err != nil {
		files = run.Files{Error: x.whyNot(ctx, err)}
	}
	if files == (run.Files{}) {
		return
	}
	x.files = &files
	data := run.FilesData{Files: files, Names: named[:min(len(named), maxNamed)]}
	if err := x.line.emit(context.WithoutCancel(ctx), run.NewEvent{Type: run.EventFiles, Data: data}); err != nil {
		x.Log.Warn("cannot append", "run", x.lease.Run, "error", err)
	}
}

func (x *execution) takeFiles(ctx context.Context) (run.Files, []run.Artifact, error) {
	sink := &artifactSink{ctx: ctx, writer: x.Store.Artifacts(x.lease)}
	left, err := x.guest.Collect(ctx, guest.Limits{Files: x.Artifacts.Files, Bytes: x.Artifacts.Bytes, Path: run.MaxArtifactPath}, sink)
	if err != nil {
		return run.Files{}, nil, err
	}
	var list []run.Artifact
	err = insistently(ctx, func() (err error) { list, err = sink.writer.Commit(ctx); return err })
	if err != nil {
		return run.Files{}, nil, err
	}
	files := run.Files{Count: len(list), Skipped: left.Skipped, Truncated: left.Truncated}
	for _, a := range list {
		files.Bytes += a.Size
	}
	return files, list, nil
}

// whyNot is the code of what kept files from being collected. The guest may have named them badly, or twice.
func (x *execution) whyNot(ctx context.Context, err error) string {
	if cause := context.Cause(ctx); cause != nil {
		err = cause
	}
	switch {
	case errors.Is(err, errCancelled):
		return "cancelled"
	case errors.Is(err, errTimedOut), errors.Is(err, errCollectTime):
		return "timed_out"
	case errors.Is(err, run.ErrBudget):
		return "budget_exhausted"
	case errors.Is(err, errMachineLost), errors.Is(err, guest.ErrLost), errors.Is(err, run.ErrRange):
		return "agent_lost"
	case errors.Is(err, run.ErrUnavailable):
		return "store_unavailable"
	}
	x.Log.Error("files not collected", "run", x.lease.Run, "error", err)
	return "internal"
}

// artifactSink hands files on to the store, again while that is away.
type artifactSink struct {
	ctx    context.Context
	writer *run.ArtifactWriter
}

func (s *artifactSink) Begin(path string, mode uint32) error { return s.writer.Begin(path, mode) }

func (s *artifactSink) Write(p []byte) error {
	return insistently(s.ctx, func() error { return s.writer.Write(s.ctx, p) })
}

// insistently does something again while the store is away, until ctx ends.
func insistently(ctx context.Context, do func() error) error {
	for {
		err := do()
		if !errors.Is(err, run.ErrUnavailable) || !sleepUntil(ctx, time.Now().Add(50*time.Millisecond)) {
			return err
		}
	}
}
