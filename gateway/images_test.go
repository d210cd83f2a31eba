package gateway

import (
	"errors"
	"net/http"
	"strings"
	"testing"

	"github.com/ephemeral-run/ephemeral/client"
	"github.com/ephemeral-run/ephemeral/run"
)

func TestImageOfRequest(t *testing.T) {
	serving := func(known bool, names ...string) rules {
		r := testRules
		r.images, r.imagesKnown = names, known
		return r
	}
	for _, c := range []struct {
		name, member string
		rules        rules
		want         string // image of the spec
		code         Code   // "": accepted
		says         string
	}{
		{"left out", "", testRules, "", "", ""},
		{"default written out", `,"image":"base"`, testRules, "", "", ""},
		{"another", `,"image":"data"`, testRules, "data", "", ""},
		{"unknown", `,"image":"nope"`, testRules, "", CodeUnknownImage, "nope; it serves base, data"},
		{"empty", `,"image":""`, testRules, "", CodeInvalidRequest, "is empty"},
		{"null", `,"image":null`, testRules, "", CodeInvalidRequest, ""},
		{"default not served", "", serving(true, "data"), "", CodeUnknownImage, "is required, since this server does not serve base; it serves data"},
		{"none in common", `,"image":"data"`, serving(true), "", CodeUnknownImage, "is not an image of this server: data"},
		{"no node yet", "", serving(false), "", "", ""},
		{"no node yet, default", `,"image":"base"`, serving(false), "", "", ""},
		{"no node yet, another", `,"image":"data"`, serving(false), "", CodeUnknownImage, "data"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s, err := parseSpec([]byte(`{"command":"true"`+c.member+`}`), c.rules)
			if c.code == "" {
				if err != nil || s.Image != c.want {
					t.Errorf("image %q, %v; want %q", s.Image, err, c.want)
				}
				return
			}
			var p *Problem
			if !errors.As(err, &p) || p.Code != c.code || len(p.Errors) != 1 || p.Errors[0].Field != "image" || !strings.Contains(p.Errors[0].Detail, c.says) {
				t.Errorf("%v, %+v; want %s of image that says %q", err, p, c.code, c.says)
			}
		})
	}
}

// The images that a run can name are those that the nodes say they serve, and its organisation may use.
func TestImagesOfACell(t *testing.T) {
	l := newLive(t, Config{})
	m := l.newMember("org_images", 1_000_000)
	l.must(l.store.Announce(l.ctx, run.Node{ID: "n1", Images: []string{"base", "data", "tools"}}))
	l.must(l.store.Announce(l.ctx, run.Node{ID: "n2", Images: []string{"base", "data"}}))
	create := func(image string) (client.Created, *client.Problem) {
		t.Helper()
		r, err := m.CreateRun(l.ctx, client.Request{Command: "true", Image: image}, client.CreateOptions{})
		var p *client.Problem
		if err != nil && !errors.As(err, &p) {
			t.Fatal(err)
		}
		return r, p
	}
	if r, p := create("data"); p != nil || r.Run.Request.Image != "data" {
		t.Errorf("data: %+v, %v", r.Run.Request, p)
	}
	if r, p := create("base"); p != nil || r.Run.Request.Image != "" {
		t.Errorf("base: %+v, %v", r.Run.Request, p)
	}
	if _, p := create("tools"); p == nil || p.Status != http.StatusUnprocessableEntity || p.Code != "unknown_image" || len(p.Errors) != 1 ||
		p.Errors[0].Field != "image" || !strings.Contains(p.Errors[0].Detail, "base, data") {
		t.Errorf("an image of one node only: %+v", p)
	}
	o, err := l.admin.AllowImages(l.ctx, m.org, []string{"base"})
	if err != nil || len(o.Images) != 1 {
		t.Fatalf("%+v, %v", o, err)
	}
	if _, p := create("data"); p == nil || p.Status != http.StatusForbidden || p.Code != "image_not_allowed" || len(p.Errors) != 1 || p.Errors[0].Field != "image" {
		t.Errorf("an image that is not allowed: %+v", p)
	}
	if _, p := create(""); p != nil {
		t.Errorf("the default: %v", p)
	}
	o, err = l.admin.AllowImages(l.ctx, m.org, nil)
	if err != nil || len(o.Images) != 0 {
		t.Errorf("%+v, %v", o, err)
	}
	if _, p := create("data"); p != nil {
		t.Errorf("allowed again: %v", p)
	}
	var p *client.Problem
	if _, err := l.admin.AllowImages(l.ctx, m.org, []string{"No"}); !errors.As(err, &p) || p.Code != string(CodeInvalidRequest) {
		t.Errorf("no name of an image: %v", err)
	}
	if _, err := m.AllowImages(l.ctx, m.org, nil); !errors.As(err, &p) || p.Status != http.StatusForbidden {
		t.Errorf("a member: %v", err)
	}
}
