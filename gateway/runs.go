package gateway

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/gofiber/fiber/v2"

	"github.com/ephemeral-run/ephemeral/run"
)

// createRun answers POST /v1/runs.
func (s *Server) createRun(ctx context.Context, c *fiber.Ctx, key run.Key) error {
	idempotency, err := idempotencyKey(headerValues(c, headerIdempotencyKey))
	if err != nil {
		return err
	}
	body, release, err := s.readBody(ctx, c)
	if err != nil {
		return err
	}
	release = sync.OnceFunc(release)
	defer release()
	record, replayed, err := s.admit(ctx, c, key, body, idempotency)
	if err != nil {
		return err
	}
	callOf(c).run = record.ID
	callOf(c).trace.Admitted(record, replayed)
	s.metrics.admitted(replayed)
	if replayed {
		c.Set(headerIdempotencyReplay, "true")
	}
	setHeader(c, fiber.HeaderLocation, "/v1/runs/"+string(record.ID))
	if preferredWait(headerValues(c, headerPrefer)) > 0 {
		release() // await holds no files
	}
	record, waited, err := s.waitIfPreferred(c, key, record)
	if err != nil {
		return err
	}
	if waited && record.State.Terminal() {
		return s.sendRun(c, key.Org, http.StatusOK, record)
	}
	return s.sendRun(c, key.Org, http.StatusAccepted, record)
}

// admit admits the run that a request's body asks for.
func (s *Server) admit(ctx context.Context, c *fiber.Ctx, key run.Key, body []byte, idempotency string) (record run.Run, replayed bool, err error) {
	admission, err := s.admission(ctx, key, body)
	if err != nil {
		return run.Run{}, false, err
	}
	admission.IdempotencyKey = idempotency
	if err := s.traced(c, &admission); err != nil {
		return run.Run{}, false, err
	}
	return s.deps.Store.Admit(ctx, admission)
}

// traced begins the trace of the run, where traces are on: in the client's, or in one that is named like the run.
func (s *Server) traced(c *fiber.Ctx, a *run.Admission) (err error) {
	if s.deps.Traces == nil {
		return nil
	}
	if a.ID, err = run.NewID(); err != nil {
		return err
	}
	k := callOf(c)
	k.trace = s.deps.Traces.Request(k.start, c.Get("traceparent"), a.ID)
	a.Spec.Traceparent, a.Encoded = k.trace.Traceparent(), ""
	return nil
}

// admission turns a request's body into an admission.
func (s *Server) admission(ctx context.Context, key run.Key, body []byte) (run.Admission, error) {
	connections := finder{ctx: ctx, store: s.deps.Store, org: key.Org}
	names, known, err := s.images.in(ctx, s.deps.Store)
	if err != nil {
		return run.Admission{}, err
	}
	spec, err := parseSpec(body, rules{
		images:        names,
		imagesKnown:   known,
		hasModel:      s.deps.HasModel,
		defaultModel:  s.deps.DefaultModel,
		hasConnection: connections.has,
	})
	if connections.err != nil {
		return run.Admission{}, connections.err
	}
	if err != nil {
		return run.Admission{}, err
	}
	print, canonical, err := fingerprint(spec)
	if err != nil {
		return run.Admission{}, err
	}
	return run.Admission{Org: key.Org, Key: key.ID, Spec: spec, Encoded: canonical, Fingerprint: print, FirstSlice: s.deps.FirstSlice,
		UploadBytes: s.cfg.Uploads.besides(spec.Files)}, nil
}

// waitIfPreferred waits for the run's end as long as the client prefers, at most MaxWait. waited tells whether there
// was such a wish. A key that was revoked or expired meanwhile gets no answer.
func (s *Server) waitIfPreferred(c *fiber.Ctx, key run.Key, record run.Run) (latest run.Run, waited bool, err error) {
	d := min(preferredWait(headerValues(c, headerPrefer)), s.cfg.MaxWait)
	if d <= 0 {
		return record, false, nil
	}
	c.Set(headerPreferenceApplied, "wait="+strconv.Itoa(int(d/time.Second)))
	began := time.Now()
	nc := c.Context().Conn()
	record = s.await(key.Org, record, d, func() bool { return gone(nc) })
	if time.Since(began) > stillThere {
		if err := s.stillValid(callOf(c)); err != nil {
			return run.Run{}, true, err
		}
	}
	return record, true, nil
}

// stillValid is nil unless the key or share was revoked or has expired since the request was authenticated. That this
// cannot be asked now takes nothing from the client.
func (s *Server) stillValid(k *call) error {
	if k.valid == nil {
		return nil
	}
	ctx := s.deadline()
	err := k.valid(ctx)
	if errors.Is(err, run.ErrUnauthenticated) || errors.Is(err, run.ErrNotFound) {
		return fmt.Errorf("after the wait: %w", run.ErrUnauthenticated)
	}
	return nil
}

// stillThere is how often a wait asks whether its client is still there.
const stillThere = time.Second

// await returns the run when it has ended, or as last seen after d, when the client has left or when the gateway drains.
// It does not fail: that the run cannot be read now does not undo what the client has. While it waits it holds no contents of
// files, and returns none where the run could not be read again.
func (s *Server) await(org string, record run.Run, d time.Duration, left func() bool) run.Run {
	r := s.hub.join(org, record.ID)
	defer s.hub.leave(r)
	timer, look := time.NewTimer(d), time.NewTicker(stillThere)
	defer timer.Stop()
	defer look.Stop()
	record = withoutFiles(record)
	latest := s.refresh(org, record) // it may have ended before the reader joined
	for !latest.State.Terminal() {
		record, latest = withoutFiles(latest), run.Run{}
		select {
		case <-timer.C:
			return s.refresh(org, record)
		case <-look.C:
			if left() {
				return record
			}
			latest = record
			continue
		case <-r.wake:
		}
		t := r.take()
		ended := t.gap || t.cut
		for _, f := range t.frames {
			ended = ended || f.last
		}
		latest = record
		if ended || t.drained {
			latest = s.refresh(org, record)
		}
		if t.drained || t.cut {
			return latest
		}
	}
	return latest
}

// withoutFiles is the run without what its files hold.
func withoutFiles(r run.Run) run.Run {
	if r.Request == nil || len(r.Request.Files) == 0 {
		return r
	}
	spec := *r.Request
	spec.Files = slices.Clone(spec.Files)
	for i := range spec.Files {
		spec.Files[i].Content = ""
	}
	r.Request = &spec
	return r
}

// refresh reads the run again; when that fails it is what was known.
func (s *Server) refresh(org string, record run.Run) run.Run {
	ctx := s.deadline()
	latest, err := s.deps.Store.Get(ctx, org, record.ID)
	if err != nil {
		s.log.Warn("run cannot be read while a client waits for it", "run", record.ID, "error", err)
		return record
	}
	return latest
}

// getRun answers GET /v1/runs/{id}; with Prefer: wait it answers when the run has ended.
func (s *Server) getRun(ctx context.Context, c *fiber.Ctx, key run.Key) error {
	id, err := runID(c)
	if err != nil {
		return err
	}
	record, err := s.deps.Store.Get(ctx, key.Org, id)
	if err != nil {
		return err
	}
	record, _, err = s.waitIfPreferred(c, key, record)
	if err != nil {
		return err
	}
	return s.sendRun(c, key.Org, http.StatusOK, record)
}

// cancelRun answers POST /v1/runs/{id}/cancel: 202 while the node still has to end the run. Cancelling an ended run
// changes nothing and is no error.
func (s *Server) cancelRun(ctx context.Context, c *fiber.Ctx, key run.Key) error {
	id, err := runID(c)
	if err != nil {
		return err
	}
	record, err := s.deps.Store.Cancel(ctx, key.Org, id)
	if err != nil {
		return err
	}
	if record.State.Terminal() {
		return s.sendRun(c, key.Org, http.StatusOK, record)
	}
	return s.sendRun(c, key.Org, http.StatusAccepted, record)
}

// deleteRun answers DELETE /v1/runs/{id}.
func (s *Server) deleteRun(ctx context.Context, c *fiber.Ctx, key run.Key) error {
	id, err := runID(c)
	if err != nil {
		return err
	}
	err = s.deps.Store.Delete(ctx, key.Org, id)
	if errors.Is(err, run.ErrState) {
		return problem(CodeRunNotFinished, "")
	}
	if err != nil {
		return err
	}
	return c.SendStatus(http.StatusNoContent)
}

// getAccount answers GET /v1/account.
func (s *Server) getAccount(ctx context.Context, c *fiber.Ctx, key run.Key) error {
	account, err := s.deps.Store.Account(ctx, key.Org)
	if err != nil {
		return err
	}
	return sendJSON(c, http.StatusOK, account)
}

// runID reads the run's id from the address.
func runID(c *fiber.Ctx) (run.ID, error) {
	id, err := run.ParseID(c.Params("id"))
	if err != nil {
		return "", err
	}
	callOf(c).run = id
	return id, nil
}

// sendJSON answers with v.
func sendJSON(c *fiber.Ctx, status int, v any) error {
	body, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("encode answer: %w", err)
	}
	setHeader(c, fiber.HeaderContentType, fiber.MIMEApplicationJSON)
	return c.Status(status).Send(body)
}
