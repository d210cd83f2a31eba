package server

import (
	"context"
	"errors"
	"io"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/ephemeral-run/ephemeral/guestagent/files"
	"github.com/ephemeral-run/ephemeral/guestagent/proto"
)

// Bounds of one message, in bytes.
const (
	maxPutChunk = 1 << 20
	getChunk    = 256 << 10
)

// PutFile writes one file into the scratch directory.
func (s *Server) PutFile(_ context.Context, stream proto.Agent_PutFileServer) (*proto.PutFileResponse, error) {
	_, dir, err := s.ready()
	if err != nil {
		return nil, err
	}
	first, err := stream.Recv()
	if err != nil {
		return nil, err
	}
	n, err := dir.Put(first.Path, first.Mode, &putReader{stream: stream, rest: first.Data})
	if err != nil {
		return nil, failure(err)
	}
	return &proto.PutFileResponse{Bytes: n}, nil
}

// putReader is the content of a file being put.
type putReader struct {
	stream proto.Agent_PutFileServer
	rest   []byte
}

func (r *putReader) Read(p []byte) (int, error) {
	for len(r.rest) == 0 {
		message, err := r.stream.Recv()
		if err != nil {
			return 0, err
		}
		if len(message.Data) > maxPutChunk {
			return 0, status.Errorf(codes.InvalidArgument, "message of %d bytes, limit %d", len(message.Data), maxPutChunk)
		}
		r.rest = message.Data
	}
	n := copy(p, r.rest)
	r.rest = r.rest[n:]
	return n, nil
}

// GetFile reads one file of the scratch directory.
func (s *Server) GetFile(_ context.Context, r *proto.GetFileRequest, stream proto.Agent_GetFileServer) error {
	_, dir, err := s.ready()
	if err != nil {
		return err
	}
	if r.Limit < 0 {
		return status.Errorf(codes.InvalidArgument, "limit %d", r.Limit)
	}
	if err := dir.Get(r.Path, r.Limit, getWriter{stream}); err != nil {
		return failure(err)
	}
	return nil
}

type getWriter struct{ stream proto.Agent_GetFileServer }

func (w getWriter) Write(p []byte) (int, error) {
	for rest := p; len(rest) > 0; {
		n := min(len(rest), getChunk)
		if err := w.stream.Send(&proto.GetFileResponse{Data: rest[:n]}); err != nil {
			return len(p) - len(rest), err
		}
		rest = rest[n:]
	}
	return len(p), nil
}

// Collect sends what the run left in out/ of the scratch directory.
func (s *Server) Collect(_ context.Context, r *proto.CollectRequest, stream proto.Agent_CollectServer) error {
	_, dir, err := s.ready()
	if err != nil {
		return err
	}
	if r.MaxFiles < 0 || r.MaxBytes < 0 || r.MaxPath < 0 {
		return status.Error(codes.InvalidArgument, "negative limit")
	}
	buffer := make([]byte, getChunk)
	left, err := dir.Collect(files.Limits{Files: r.MaxFiles, Bytes: r.MaxBytes, Path: r.MaxPath},
		func(path string, mode uint32, content io.Reader) error {
			message := &proto.CollectResponse{Path: path, Mode: mode}
			for {
				n, err := io.ReadFull(content, buffer)
				last := errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF)
				if err != nil && !last {
					return err
				}
				if n == 0 && message.Path == "" {
					return nil
				}
				message.Data = buffer[:n]
				if err := stream.Send(message); err != nil || last {
					return err
				}
				message = &proto.CollectResponse{}
			}
		})
	if err != nil {
		return failure(err)
	}
	return stream.Send(&proto.CollectResponse{End: &proto.CollectEnd{Skipped: left.Skipped, Truncated: left.Truncated}})
}

// isFileFault says whether the path itself is wrong: through a link, over a file, onto a directory, too long.
func isFileFault(err error) bool {
	for _, errno := range []unix.Errno{unix.ELOOP, unix.EXDEV, unix.ENOTDIR, unix.EISDIR, unix.EEXIST, unix.ENAMETOOLONG, unix.ENOTEMPTY} {
		if errors.Is(err, errno) {
			return true
		}
	}
	return false
}

func isNoSpace(err error) bool {
	return errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.ENOMEM) || errors.Is(err, unix.EDQUOT)
}
