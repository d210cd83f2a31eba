package gateway

import (
	"net/http"

	"github.com/gofiber/fiber/v2"
	"github.com/gofiber/fiber/v2/middleware/adaptor"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/ephemeral-run/ephemeral/gateway/api"
	"github.com/ephemeral-run/ephemeral/run"
)

// route is one operation.
type route struct {
	method, path string
	handler      fiber.Handler
}

// publicRoutes are the operations of the public API.
func (s *Server) publicRoutes() []route {
	get, post, put, del := http.MethodGet, http.MethodPost, http.MethodPut, http.MethodDelete
	return withHead([]route{
		{post, "/v1/runs", s.as(run.Member, s.createRun)},
		{get, "/v1/runs", s.as(run.Member, s.listRuns)},
		{get, "/v1/runs/:id", s.as(run.Member, s.getRun)},
		{del, "/v1/runs/:id", s.as(run.Member, s.deleteRun)},
		{get, "/v1/runs/:id/events", s.as(run.Member, s.getEvents)},
		{get, "/v1/runs/:id/files", s.as(run.Member, s.listArtifacts)},
		{get, "/v1/runs/:id/files/*", s.as(run.Member, s.getArtifact)},
		{post, "/v1/uploads", s.as(run.Member, s.createUpload)},
		{get, "/v1/uploads/:id", s.as(run.Member, s.getUpload)},
		{del, "/v1/uploads/:id", s.as(run.Member, s.deleteUpload)},
		{post, "/v1/runs/:id/cancel", s.as(run.Member, s.cancelRun)},
		{post, "/v1/runs/:id/shares", s.as(run.Member, s.createShare)},
		{get, "/v1/runs/:id/shares", s.as(run.Member, s.listShares)},
		{del, "/v1/runs/:id/shares/:share", s.as(run.Member, s.revokeShare)},
		{get, "/v1/shared", s.withShare(s.getShared)},
		{get, "/v1/shared/events", s.withShare(s.getSharedEvents)},
		{get, "/v1/account", s.as(run.Member, s.getAccount)},
		{get, "/v1/usage", s.as(run.Member, s.getUsage)},
		{get, "/v1/account/statement", s.as(run.Member, s.getStatement)},
		{get, "/v1/account/limits", s.as(run.Member, s.getLimits)},

		{post, "/v1/orgs", s.as(run.Admin, s.createOrg)},
		{get, "/v1/orgs", s.as(run.Admin, s.listOrgs)},
		{get, "/v1/orgs/:id", s.as(run.Admin, s.getOrg)},
		{get, "/v1/orgs/:id/account", s.as(run.Admin, s.getOrgAccount)},
		{get, "/v1/orgs/:id/usage", s.as(run.Admin, s.getOrgUsage)},
		{post, "/v1/orgs/:id/members", s.as(run.Admin, s.addMember)},
		{get, "/v1/orgs/:id/members", s.as(run.Admin, s.listMembers)},
		{del, "/v1/orgs/:id/members/:member", s.as(run.Admin, s.removeMember)},
		{get, "/v1/nodes", s.as(run.Admin, s.listNodes)},
		{get, "/v1/queues", s.as(run.Admin, s.listQueues)},
		{get, "/v1/orgs/:id/statement", s.as(run.Admin, s.getOrgStatement)},
		{get, "/v1/orgs/:id/limits", s.as(run.Admin, s.getOrgLimits)},
		{put, "/v1/orgs/:id/limits", s.as(run.Admin, s.putOrgLimits)},
		{put, "/v1/orgs/:id/retention", s.as(run.Admin, s.putOrgRetention)},
		{put, "/v1/orgs/:id/images", s.as(run.Admin, s.putOrgImages)},
		{post, "/v1/orgs/:id/credits", s.as(run.Admin, s.credit)},
		{post, "/v1/orgs/:id/keys", s.as(run.Admin, s.createKey)},
		{get, "/v1/orgs/:id/keys", s.as(run.Admin, s.listKeys)},
		{put, "/v1/orgs/:id/connections/:name", s.as(run.Admin, s.putConnection)},
		{get, "/v1/orgs/:id/connections", s.as(run.Admin, s.listConnections)},
		{get, "/v1/orgs/:id/connections/:name", s.as(run.Admin, s.getConnection)},
		{del, "/v1/orgs/:id/connections/:name", s.as(run.Admin, s.deleteConnection)},
		{get, "/v1/receipt-keys", s.as(run.Member, s.receiptKeys)},
		{get, "/v1/keys/:id/limits", s.as(run.Admin, s.getKeyLimits)},
		{put, "/v1/keys/:id/limits", s.as(run.Admin, s.putKeyLimits)},
		{del, "/v1/keys/:id", s.as(run.Admin, s.revokeKey)},
		{get, "/v1/pools", s.as(run.Admin, s.listPools)},
		{get, "/v1/pools/:name", s.as(run.Admin, s.getPool)},
		{put, "/v1/pools/:name", s.as(run.Admin, s.setPool)},
		{post, "/v1/pools/:name/prediction", s.as(run.Admin, s.predictPool)},
		{get, "/v1/signup", s.getSignup},
		{post, "/v1/signup", s.signUp},

		{get, "/openapi.yaml", s.openAPI},
		{get, "/healthz", s.healthz},
		{get, "/readyz", s.readyz(false)},
	})
}

// adminRoutes are the operations of the admin listener, which asks for no key.
func (s *Server) adminRoutes() []route {
	shown := adaptor.HTTPHandler(promhttp.HandlerFor(s.deps.Registry, promhttp.HandlerOpts{Registry: s.deps.Registry}))
	return withHead([]route{
		{http.MethodGet, "/metrics", shown},
		{http.MethodGet, "/healthz", s.healthz},
		{http.MethodGet, "/readyz", s.readyz(true)},
	})
}

// withHead lets HEAD be asked wherever GET may.
func withHead(routes []route) []route {
	all := routes
	for _, r := range routes {
		if r.method == http.MethodGet {
			all = append(all, route{http.MethodHead, r.path, r.handler})
		}
	}
	return all
}

// openAPI answers with the description of this API.
func (s *Server) openAPI(c *fiber.Ctx) error {
	c.Set(fiber.HeaderContentType, "application/yaml")
	return c.Send(api.Description)
}
