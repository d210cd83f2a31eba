package guest

import (
	"context"
	"math"

	"github.com/ephemeral-run/ephemeral/guestagent/proto"
)

// collectChunk is the size of every piece of a collected file but its last, in bytes; agent.proto.
const collectChunk = 256 << 10

// Limits bound what Collect takes from a machine.
type Limits struct {
	Files int
	Bytes int64 // of all files together
	Path  int   // of one path, in bytes
}

// Left counts what a machine had and did not hand over.
type Left struct {
	Skipped   int64 // links, devices, pipes, sockets, odd names
	Truncated bool  // files beyond the limits
}

// Sink takes the files of a Collect, one after the other: Begin, then Write for its content, if it has any. The paths are
// what the guest says: nothing but their length is checked.
type Sink interface {
	Begin(path string, mode uint32) error
	Write(p []byte) error
}

// Collect takes what the run left in out/ of its scratch directory.
func (c *Client) Collect(ctx context.Context, l Limits, sink Sink) (Left, error) {
	var left Left
	err := c.do(ctx, "collect files", func(k *call) error {
		// Each file may end with a piece that is not full; the end, and the end of the stream.
		k.guard.streaming(2*int64(l.Files) + l.Bytes/collectChunk + 2)
		stream, err := k.agent.Collect(ctx, &proto.CollectRequest{MaxFiles: int64(l.Files), MaxBytes: l.Bytes, MaxPath: int64(l.Path)})
		if err != nil {
			return err
		}
		pieces := newQueue[*proto.CollectResponse](math.MaxInt32, int(min(l.Bytes, math.MaxInt32))+l.Files*(l.Path+64)+maxMessage)
		defer pieces.stop(k.guard)
		go pieces.fill(k.guard, stream.Recv, func(r *proto.CollectResponse) int { return len(r.Path) + len(r.Data) + 64 })
		left, err = receiveFiles(pieces, l, sink)
		return err
	})
	return left, err
}

// receiveFiles checks what comes against the limits and hands it on.
func receiveFiles(pieces *queue[*proto.CollectResponse], l Limits, sink Sink) (Left, error) {
	files, bytes := 0, int64(0)
	for {
		r, err := pieces.next()
		if err != nil {
			return Left{}, err
		}
		switch {
		case r.End != nil:
			if r.Path != "" || len(r.Data) > 0 || r.End.Skipped < 0 {
				return Left{}, broke("an end that is none")
			}
			return Left{Skipped: r.End.Skipped, Truncated: r.End.Truncated}, nil
		case len(r.Path) > l.Path || len(r.Data) > collectChunk:
			return Left{}, broke("path of %d bytes, piece of %d bytes", len(r.Path), len(r.Data))
		case r.Path == "" && (files == 0 || len(r.Data) == 0):
			return Left{}, broke("a piece of no file")
		}
		if r.Path != "" {
			if files++; files > l.Files {
				return Left{}, broke("more than %d files", l.Files)
			}
			if err := sink.Begin(r.Path, r.Mode&0o777); err != nil {
				return Left{}, &callerError{err}
			}
		}
		if bytes += int64(len(r.Data)); bytes > l.Bytes {
			return Left{}, broke("more than %d bytes of files", l.Bytes)
		}
		if len(r.Data) == 0 {
			continue
		}
		if err := sink.Write(r.Data); err != nil {
			return Left{}, &callerError{err}
		}
	}
}
