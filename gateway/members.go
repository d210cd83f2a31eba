package gateway

import (
	"context"
	"net/http"

	"github.com/gofiber/fiber/v2"

	"github.com/ephemeral-run/ephemeral/run"
)

type (
	memberList struct {
		Members []run.OrgMember `json:"members"`
	}
	nodeList struct {
		Nodes []run.Node `json:"nodes"`
	}
)

// addMember answers POST /v1/orgs/{id}/members.
func (s *Server) addMember(ctx context.Context, c *fiber.Ctx, _ run.Key) error {
	org, err := s.org(ctx, c)
	if err != nil {
		return err
	}
	name, err := s.readName(ctx, c)
	if err != nil {
		return err
	}
	m, err := s.deps.Store.AddMember(ctx, org.ID, name)
	if err != nil {
		return err
	}
	c.Set(fiber.HeaderLocation, "/v1/orgs/"+org.ID+"/members/"+m.ID)
	return sendJSON(c, http.StatusCreated, m)
}

// listMembers answers GET /v1/orgs/{id}/members.
func (s *Server) listMembers(ctx context.Context, c *fiber.Ctx, _ run.Key) error {
	org, err := s.org(ctx, c)
	if err != nil {
		return err
	}
	members, err := s.deps.Store.Members(ctx, org.ID)
	if err != nil {
		return err
	}
	return sendJSON(c, http.StatusOK, memberList{nonNil(members)})
}

// removeMember answers DELETE /v1/orgs/{id}/members/{member}: it revokes the member's keys as well.
func (s *Server) removeMember(ctx context.Context, c *fiber.Ctx, _ run.Key) error {
	if err := s.deps.Store.RemoveMember(ctx, c.Params("id"), c.Params("member")); err != nil {
		return err
	}
	return c.SendStatus(http.StatusNoContent)
}

// listNodes answers GET /v1/nodes.
func (s *Server) listNodes(ctx context.Context, c *fiber.Ctx, _ run.Key) error {
	nodes, err := s.deps.Store.Nodes(ctx)
	if err != nil {
		return err
	}
	return sendJSON(c, http.StatusOK, nodeList{nonNil(nodes)})
}
