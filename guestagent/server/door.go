package server

import (
	"context"
	"net"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/ephemeral-run/ephemeral/guestagent/door"
	"github.com/ephemeral-run/ephemeral/guestagent/proto"
)

// doorConns is how many requests of programs reach the broker at once; more wait.
const doorConns = 32

// OpenDoor makes the broker reachable for the commands of the machine.
func (s *Server) OpenDoor(ctx context.Context, _ *proto.OpenDoorRequest) (*proto.OpenDoorResponse, error) {
	if _, _, err := s.ready(); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.door != nil {
		return nil, status.Error(codes.FailedPrecondition, "the door is open already")
	}
	var listening net.ListenConfig
	l, err := listening.Listen(ctx, "tcp4", s.DoorAddress)
	if err != nil {
		return nil, status.Errorf(codes.Internal, "open door: %v", err)
	}
	host, _, err := net.SplitHostPort(s.DoorAddress)
	if err == nil {
		err = s.AddHost(host, door.Host)
	}
	if err != nil {
		_ = l.Close()
		return nil, status.Errorf(codes.Internal, "open door: %v", err)
	}
	s.door = door.Open(l, s.brokerTransport(doorConns), s.Log)
	return &proto.OpenDoorResponse{}, nil
}
