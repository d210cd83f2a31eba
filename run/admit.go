package run

import (
	"context"
	"fmt"
	"time"
)

// idempotencyTTL is how long an idempotency key is remembered.
const idempotencyTTL = 24 * time.Hour

// maxSpecBytes bounds the request of one run, files included, as JSON.
const maxSpecBytes = 64 << 20

// maxRetentionSeconds bounds the retention that a request or an organisation may ask for: ten years.
const maxRetentionSeconds = 10 * 365 * 86400

var admitScript = loadScript("admit")

// Admit accepts a run: it reserves the whole of MaxCostMicros, stores the record and queues it, in one step. With an
// idempotency key that was used in the last 24 hours for the same request it returns that run as it is now, replayed.
// Errors, each without any effect: ErrIdempotencyConflict (the key was used for another request), ErrBudget (the hold
// cannot pay the first slice of compute), ErrInsufficientFunds, ErrImage (the organisation may not use the image), ErrQueueFull (of the
// organisation or of its key; a *QueueFullError), an *UploadError (a file's upload cannot be used), ErrNotFound (no such organisation),
// ErrRange, ErrStorageFull, ErrUnavailable (repeat the call: with the key nothing happens twice).
//
// Script admit.lua.
func (s *Store) Admit(ctx context.Context, a Admission) (r Run, replayed bool, err error) {
	fail := func(err error) (Run, bool, error) {
		return Run{}, false, fmt.Errorf("admit run for organisation %.64s: %w", a.Org, err)
	}
	if err := a.check(); err != nil {
		return fail(err)
	}
	if err := s.Full(); err != nil && !s.used(ctx, a) {
		return fail(err)
	}
	kept, whole := a.Spec.split()
	request, spec, err := a.encode(kept, whole)
	if err != nil {
		return fail(err)
	}
	if len(request)+len(spec) > maxSpecBytes {
		return fail(fmt.Errorf("request has more than %d bytes: %w", maxSpecBytes, ErrRange))
	}
	id := a.ID
	if id == "" {
		if id, err = NewID(); err != nil {
			return fail(err)
		}
	}
	fingerprint := ""
	if a.IdempotencyKey != "" {
		fingerprint = a.Fingerprint
	}
	now := s.micros()
	k, rid := s.keys, string(id)
	prefix, suffix := k.runAround()
	args := []any{k.events(), k.work(), rid, a.Org, now, fingerprint, idempotencyTTL.Milliseconds(), int64(a.Spec.MaxCostMicros),
		int64(a.FirstSlice), request, spec, flag(a.Spec.ZeroDataRetention), a.Key, s.cfg.QueueLimit, s.cfg.Concurrency,
		prefix, suffix, (time.Duration(a.Spec.RetentionSeconds) * time.Second).Milliseconds(), a.Spec.ImageName()}
	rep, err := s.eval(ctx, admitScript,
		[]string{k.idem(a.Org, a.IdempotencyKey), k.run(rid), k.runEvents(rid), k.spec(rid), k.org(a.Org), k.queue(a.Org),
			k.active(a.Org), k.runs(a.Org), k.ring(), k.limits(a.Key), k.parked(a.Org), k.keyParked(a.Key), k.leases()},
		a.withUploads(args)...)
	if err != nil {
		return fail(err)
	}
	shown := kept
	if !a.Spec.ZeroDataRetention {
		shown = a.Spec
	}
	if rep.code() == "WAITS" {
		place, err := decodePlace(rep, 3)
		if err != nil {
			return fail(err)
		}
		queued, err := rep.int(2)
		if err != nil {
			return fail(err)
		}
		return waiting(ID(rep.text(1)), a.Org, queued, place, shown), true, nil
	}
	if rep.code() == "REPLAY" {
		place, err := decodePlace(rep, 3)
		if err != nil {
			return fail(err)
		}
		r, err := s.whole(ctx, a.Org, ID(rep.text(1)), rep.record(2), place, sameSpec{request, kept})
		if err != nil {
			return fail(fmt.Errorf("replay: %w", err))
		}
		return r, true, nil
	}
	switch rep.code() {
	case "FULL":
		return fail(queueFull(rep))
	case "UPLOAD", "RETAINED", "SIZE":
		return fail(a.uploadError(rep))
	}
	if err := refused(rep); err != nil {
		return fail(err)
	}
	place, err := decodePlace(rep, 1)
	if err != nil {
		return fail(err)
	}
	return waiting(id, a.Org, now, place, shown), false, nil
}

// used tells whether the idempotency key of the admission is known: then it is answered without any change, for which there
// need be no room.
func (s *Store) used(ctx context.Context, a Admission) bool {
	if a.IdempotencyKey == "" {
		return false
	}
	n, err := s.rdb.Exists(ctx, s.keys.idem(a.Org, a.IdempotencyKey)).Result()
	return err == nil && n == 1
}

// waiting is a run that nothing has happened to since it was queued.
func waiting(id ID, org string, queued int64, place *Place, request Spec) Run {
	return Run{ID: id, Org: org, State: Queued, QueuedAt: time.UnixMicro(queued).UTC(), Queue: place, Request: &request,
		Money: Money{Reserved: request.MaxCostMicros}}
}

// encode returns the request as the record keeps it, and whole where that is not the same.
func (a Admission) encode(kept Spec, whole bool) (request string, spec []byte, err error) {
	switch {
	case whole && a.Encoded != "":
		return a.Encoded, nil, nil
	case whole:
		request, err = encode("request", &kept)
		return request, nil, err
	case a.Encoded != "":
		spec = []byte(a.Encoded)
	default:
		if spec, err = encodeWhole(&a.Spec); err != nil {
			return "", nil, err
		}
	}
	request, err = encode("request", &kept)
	return request, spec, err
}

// check refuses what no script should see.
func (a Admission) check() error {
	switch {
	case !validOrg(a.Org):
		return ErrNotFound
	case a.ID != "" && !validID(string(a.ID)):
		return fmt.Errorf("run id %.64q: %w", a.ID, ErrRange)
	case len(a.Key) > 64 || !urlSafe.spells(a.Key):
		return fmt.Errorf("API key id %.80q: %w", a.Key, ErrRange)
	case a.Spec.MaxCostMicros <= 0 || a.Spec.MaxCostMicros > maxMicros:
		return fmt.Errorf("hold of %d micro-dollars: %w", a.Spec.MaxCostMicros, ErrRange)
	case a.Spec.RetentionSeconds < 0 || a.Spec.RetentionSeconds > maxRetentionSeconds:
		return fmt.Errorf("retention of %d seconds: %w", a.Spec.RetentionSeconds, ErrRange)
	case a.Spec.Image != "" && !imageName.MatchString(a.Spec.Image):
		return fmt.Errorf("image %.80q: %w", a.Spec.Image, ErrRange)
	case a.FirstSlice < 0 || a.FirstSlice > maxMicros:
		return fmt.Errorf("first slice of %d micro-dollars: %w", a.FirstSlice, ErrRange)
	case a.IdempotencyKey != "" && !validFingerprint(a.Fingerprint):
		return fmt.Errorf("fingerprint: want 1 to 128 visible ASCII characters: %w", ErrRange)
	}
	for i, f := range a.Spec.Files {
		if f.Upload != "" && !validUpload(string(f.Upload)) {
			return &UploadError{File: i}
		}
	}
	return nil
}

func flag(b bool) string {
	if b {
		return "1"
	}
	return "0"
}
