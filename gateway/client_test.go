package gateway

import (
	"errors"
	"reflect"
	"testing"
	"time"

	"github.com/ephemeral-run/ephemeral/client"
	"github.com/ephemeral-run/ephemeral/gateway/apitest"
)

// methods says by which method of the Go client each operation is called; some are not for programs.
var methods = map[string]string{
	"createRun": "CreateRun", "listRuns": "Runs", "getRun": "Run", "deleteRun": "Delete", "getEvents": "Events", "listFiles": "Files",
	"getFile": "Download", "createUpload": "Upload", "getUpload": "GetUpload", "deleteUpload": "DeleteUpload", "cancelRun": "Cancel", "createShare": "CreateShare", "listShares": "Shares", "revokeShare": "RevokeShare",
	"getShared": "Shared", "getSharedEvents": "SharedEvents", "getAccount": "Account", "getUsage": "Usage", "getStatement": "Statement",
	"getLimits": "Limits", "createOrg": "CreateOrg", "listOrgs": "Orgs", "getOrg": "Org", "getOrgAccount": "OrgAccount",
	"getOrgUsage": "OrgUsage", "addMember": "AddMember", "listMembers": "Members", "removeMember": "RemoveMember", "listNodes": "Nodes", "getSignup": "SignupTerms", "signUp": "SignUp", "listQueues": "Queues",
	"getOrgStatement": "OrgStatement", "getOrgLimits": "OrgLimits", "putOrgLimits": "LimitOrg", "putOrgRetention": "RetainOrg", "putOrgImages": "AllowImages",
	"credit": "Credit", "createKey": "CreateKey", "listKeys": "Keys", "putConnection": "PutConnection", "listConnections": "Connections",
	"getConnection": "Connection", "deleteConnection": "DeleteConnection", "listReceiptKeys": "ReceiptKeys",
	"getKeyLimits": "KeyLimits", "putKeyLimits": "LimitKey", "revokeKey": "RevokeKey", "listPools": "Pools", "getPool": "Pool",
	"setPool": "SetPool", "predictPool": "PredictPool", "getReadiness": "Ready", "getOpenAPI": "", "getHealth": "",
}

func TestClientHasEveryOperation(t *testing.T) {
	doc, err := apitest.Document()
	if err != nil {
		t.Fatal(err)
	}
	for path, item := range doc.Paths.Map() {
		for method, o := range item.Operations() {
			name, known := methods[o.OperationID]
			if !known {
				t.Errorf("%s %s, %s: no method of the client is named", method, path, o.OperationID)
			} else if _, there := reflect.TypeFor[*client.Client]().MethodByName(name); name != "" && !there {
				t.Errorf("the client has no %s for %s", name, o.OperationID)
			}
		}
	}
}

func TestSharesThroughTheClient(t *testing.T) {
	l := newLive(t, Config{})
	m := l.newMember("org_shares", 1_000_000)
	r := l.left(m, map[string][]byte{"a": []byte("x")})
	share, err := m.CreateShare(l.ctx, r.ID, time.Hour)
	l.must(err)
	guest := l.as(share.Token)
	shared, err := guest.Shared(l.ctx)
	l.must(err)
	events := 0
	for _, err := range guest.SharedEvents(l.ctx, 0) {
		l.must(err)
		events++
	}
	if shared.ID != r.ID || shared.Org != "" || events < 3 {
		t.Errorf("%+v, %d events", shared, events)
	}
	list, err := m.Shares(l.ctx, r.ID)
	if err != nil || len(list) != 1 {
		t.Errorf("%+v, %v", list, err)
	}
	l.must(m.RevokeShare(l.ctx, r.ID, share.ID))
	var p *client.Problem
	if _, err := guest.Shared(l.ctx); !errors.As(err, &p) || p.Status != 401 {
		t.Errorf("revoked: %v", err)
	}
}

func TestRetentionOfAnOrganisation(t *testing.T) {
	l := newLive(t, Config{})
	m := l.newMember("org_retention", 1_000_000)
	o, err := l.admin.RetainOrg(l.ctx, m.org, time.Hour)
	if err != nil || o.Retention != 3600 {
		t.Fatalf("%+v, %v", o, err)
	}
	r := l.left(m, nil)
	if r.ContentUntil == nil || !r.ContentUntil.Equal(r.EndedAt.Add(time.Hour)) {
		t.Errorf("content until %v, ended %v", r.ContentUntil, r.EndedAt)
	}
	var p *client.Problem
	if _, err := l.admin.RetainOrg(l.ctx, m.org, -time.Second); !errors.As(err, &p) || p.Code != string(CodeInvalidRequest) {
		t.Errorf("negative: %v", err)
	}
	if _, err := m.RetainOrg(l.ctx, m.org, time.Hour); !errors.As(err, &p) || p.Status != 403 {
		t.Errorf("a member: %v", err)
	}
	if _, err := l.admin.RetainOrg(l.ctx, "nobody", time.Hour); !errors.As(err, &p) || p.Status != 404 {
		t.Errorf("nobody: %v", err)
	}
}
