package guest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"unicode/utf8"

	"google.golang.org/grpc/status"

	"github.com/ephemeral-run/ephemeral/guestagent/proto"
)

const (
	putChunk = 256 << 10
	// getMessages bounds the messages of a file, of which none is empty, on their way to a slow writer.
	getMessages = math.MaxInt32
)

// PutFile writes a file below the scratch directory, with the directories above it, as the worker's. mode has its
// permission bits; 0 is 0644. It returns when the whole file is there.
func (c *Client) PutFile(ctx context.Context, path string, mode uint32, r io.Reader) error {
	if !utf8.ValidString(path) {
		return fmt.Errorf("put file: %.100q is not UTF-8", path)
	}
	return c.do(ctx, "put file", func(k *call) error {
		k.guard.streaming(2) // the answer, and one to the end of the file if that crosses a refusal
		stream, err := k.agent.PutFile(ctx)
		if err != nil {
			return err
		}
		answer := make(chan putAnswer, 1)
		go func() {
			response := new(proto.PutFileResponse)
			err := stream.RecvMsg(response)
			answer <- putAnswer{response.Bytes, err}
		}()
		sent, err := k.putContent(stream, path, mode, r, answer)
		if err != nil {
			_ = k.guard.Close() // the agent must not take half a file for a whole one
		}
		got := <-answer
		switch _, refusal := status.FromError(got.err); {
		case got.err != nil && refusal:
			return got.err
		case err != nil:
			return err
		case got.err != nil:
			return got.err
		case got.bytes != sent:
			return broke("%d bytes sent, %d written", sent, got.bytes)
		}
		return nil
	})
}

type putAnswer struct {
	bytes int64
	err   error
}

// putContent sends the file and its end, and stops when an answer comes before that, which only a refusal can be.
func (k *call) putContent(stream proto.Agent_PutFileClient, path string, mode uint32, r io.Reader, answer <-chan putAnswer) (sent int64, err error) {
	buffer := make([]byte, putChunk)
	message := &proto.PutFileRequest{Path: path, Mode: mode}
	for {
		n, err := io.ReadFull(r, buffer)
		last := errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF)
		if err != nil && !last {
			return sent, &callerError{fmt.Errorf("read content: %w", err)}
		}
		if len(answer) > 0 {
			return sent, broke("answer before the end of the file")
		}
		message.Data = buffer[:n]
		k.guard.allow(1) // each message that crosses a refusal is refused too
		if err := stream.Send(message); err != nil {
			return sent, err
		}
		sent += int64(n)
		if last {
			return sent, stream.CloseSend()
		}
		message = &proto.PutFileRequest{}
	}
}

// GetFile copies a regular file of at most limit bytes from below the scratch directory to w.
func (c *Client) GetFile(ctx context.Context, path string, limit int64, w io.Writer) error {
	if !utf8.ValidString(path) {
		return fmt.Errorf("get file: %.100q is not UTF-8", path)
	}
	return c.do(ctx, "get file", func(k *call) error {
		k.guard.streaming(unlimited)
		stream, err := k.agent.GetFile(ctx, &proto.GetFileRequest{Path: path, Limit: limit})
		if err != nil {
			return err
		}
		chunks := newQueue[*proto.GetFileResponse](getMessages, int(min(limit, math.MaxInt32))+maxMessage)
		defer chunks.stop(k.guard)
		go chunks.fill(k.guard, stream.Recv, func(r *proto.GetFileResponse) int { return max(len(r.GetData()), 1) })
		for total := int64(0); ; {
			chunk, err := chunks.next()
			if errors.Is(err, io.EOF) {
				return nil
			}
			if err != nil {
				return err
			}
			if len(chunk.Data) == 0 {
				return broke("empty piece of a file")
			}
			if total += int64(len(chunk.Data)); total > limit {
				return broke("more than the limit of %d bytes", limit)
			}
			if _, err := w.Write(chunk.Data); err != nil {
				return &callerError{fmt.Errorf("hand on content: %w", err)}
			}
		}
	})
}
