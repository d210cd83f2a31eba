package node

import (
	"bytes"
	"context"
	"encoding/base64"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/ephemeral-run/ephemeral/node/guest"
	"github.com/ephemeral-run/ephemeral/run"
)

const (
	// maxStream bounds each of a command's streams in the record, in bytes.
	maxStream = 16 << 20
	// maxEventOutput bounds the output in one event, in bytes.
	maxEventOutput = 64 << 10
	// maxEventContent bounds the commands and outputs in all events of one run, in bytes; later ones are left out.
	maxEventContent = 32 << 20
)

// command runs the spec's command, without any model.
func (x *execution) command(ctx context.Context) error {
	if x.lease.Spec.ExposeBroker {
		stop, err := x.serveBroker(ctx)
		if err != nil {
			return err
		}
		defer stop()
	}
	both := &clipped{limit: maxEventOutput}
	stdout, stderr := &clipped{limit: maxStream, also: both}, &clipped{limit: maxStream, also: both}
	began := time.Now()
	exit, err := x.guest.Exec(ctx, guest.Command{
		Args: []string{"/bin/sh", "-c", x.lease.Spec.Command}, OutputLimit: maxStream,
	}, stdout, stderr)
	data := run.ShellData{
		Command: x.lease.Spec.Command, Outcome: exit.Outcome, ExitCode: exit.Code,
		Duration: float64(time.Since(began).Microseconds()) / 1000,
		Bytes:    exit.StdoutBytes + exit.StderrBytes, Truncated: both.cut || exit.StdoutTruncated || exit.StderrTruncated,
		MemoryLimit: exit.MemoryLimit, FullMounts: exit.FullMounts,
	}
	data.Output, data.Encoding = encode(both.text())
	x.result = &run.Result{Stdout: stream(stdout, exit.StdoutBytes), Stderr: stream(stderr, exit.StderrBytes)}
	if err != nil {
		data.Outcome, data.ExitCode = "lost", -1
		if ctx.Err() != nil {
			data.Outcome = "killed"
		}
		data.Bytes = stdout.total + stderr.total
	} else {
		x.result.ExitCode = &exit.Code
	}
	if err := x.shell(context.WithoutCancel(ctx), data); err != nil {
		return err
	}
	return err
}

// shell appends a shell event.
func (x *execution) shell(ctx context.Context, data run.ShellData) error {
	if x.usage.shell(len(data.Command)+len(data.Output)) > maxEventContent {
		data.Command, data.Output, data.Encoding, data.Truncated = "", "", "", true
	}
	redacted := data
	redacted.Command, redacted.Output, redacted.Encoding = "", "", ""
	return x.line.emit(ctx, run.NewEvent{Type: run.EventShell, Data: data, Redacted: redacted})
}

// clipped keeps the first bytes of what is written to it and counts the rest. also, if set, gets everything too.
type clipped struct {
	limit int
	also  *clipped

	mu    sync.Mutex
	buf   bytes.Buffer
	total int64
	cut   bool
}

func (c *clipped) Write(p []byte) (int, error) {
	if c.also != nil {
		_, _ = c.also.Write(p)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.total += int64(len(p))
	keep := min(len(p), c.limit-c.buf.Len())
	c.buf.Write(p[:keep])
	c.cut = c.cut || keep < len(p)
	return len(p), nil
}

// text returns what was kept, without a UTF-8 sequence cut at the end.
func (c *clipped) text() []byte {
	c.mu.Lock()
	defer c.mu.Unlock()
	b := c.buf.Bytes()
	if c.cut {
		b = trimPartialRune(b)
	}
	return b
}

// trimPartialRune drops an incomplete UTF-8 sequence at the end of b, and nothing else.
func trimPartialRune(b []byte) []byte {
	for i := 1; i < utf8.UTFMax && i <= len(b); i++ {
		tail := b[len(b)-i:]
		if utf8.RuneStart(tail[0]) {
			if !utf8.FullRune(tail) {
				return b[:len(b)-i]
			}
			break
		}
	}
	return b
}

// stream is a command's output for the record.
func stream(c *clipped, written int64) *run.Stream {
	c.mu.Lock()
	defer c.mu.Unlock()
	return run.NewStream(c.buf.Bytes(), max(written, c.total))
}

// encode returns b as JSON can carry it without loss: as text when it is UTF-8, else as base64 (RFC 4648).
func encode(b []byte) (content, encoding string) {
	if utf8.Valid(b) {
		return string(b), ""
	}
	return base64.StdEncoding.EncodeToString(b), "base64"
}
