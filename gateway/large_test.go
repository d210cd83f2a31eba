package gateway

import (
	"bytes"
	"encoding/base64"
	"fmt"
	"io"
	"net"
	"net/http"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/valyala/fasthttp"
	"golang.org/x/sync/semaphore"
	"pgregory.net/rapid"

	"github.com/ephemeral-run/ephemeral/run"
)

// settledHeap is what is live in the heap once the gateway has come to rest: what it allocates while a collection runs counts
// as live, garbage or not.
func settledHeap(t *testing.T) int64 {
	t.Helper()
	live := func() int64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	last := live()
	eventually(t, "the heap at rest", func() bool {
		time.Sleep(100 * time.Millisecond)
		before := last
		last = live()
		return max(last-before, before-last) < 256<<10
	})
	return last
}

// TestLargeBodiesTakeBoundedMemory has 16 clients send 4 MiB at once where 8 MiB may be held. When as many are being admitted as
// can be, no more is in memory than their bodies and what was read of them; then all get their run, in turn.
func TestLargeBodiesTakeBoundedMemory(t *testing.T) {
	const budget, clients = 8 << 20, 16
	var inside atomic.Int64
	gate := make(chan struct{})
	body := `{"command":"true","max_cost_micros":1000,"files":[{"path":"a","encoding":"base64","content":"` +
		strings.Repeat("QUJD", 1<<20-1000) + `"},{"path":"b","content":"x"}]}`
	store := &fakeStore{
		admit: func(a run.Admission) (run.Run, bool, error) {
			inside.Add(1)
			<-gate
			return run.Run{ID: testRun, State: run.Queued, Request: &a.Spec}, false, nil
		},
		get: func(id run.ID) (run.Run, error) { // for answers that had to wait for room
			spec, err := parseSpec([]byte(body), rules{})
			return run.Run{ID: id, State: run.Queued, Request: &spec}, err
		},
	}
	s := serve(t, Config{BodyMemory: budget, StoreTimeout: time.Minute, ReadTimeout: time.Minute, WriteTimeout: time.Minute}, Deps{Store: store})
	before := settledHeap(t)
	var all sync.WaitGroup
	for range clients {
		all.Go(func() {
			size, err := post(s.url, body)
			if err != nil || size < 4<<20-8000 {
				t.Errorf("an answer of %d bytes, %v", size, err)
			}
		})
	}
	eventually(t, "two at once", func() bool { return inside.Load() == budget/(4<<20) })
	grown := settledHeap(t) - before
	if n := inside.Load(); n != 2 {
		t.Errorf("%d are admitted at once", n)
	}
	if most := int64(2*budget + clients*(64<<10)); grown > most {
		t.Errorf("the heap grew by %d KiB, want at most %d", grown>>10, most>>10)
	}
	t.Logf("the heap grew by %d KiB", grown>>10)
	close(gate)
	all.Wait()
	eventually(t, "all memory given back", func() bool {
		for _, held := range []*semaphore.Weighted{s.bodies, s.answers} {
			if !held.TryAcquire(budget) {
				return false
			}
			held.Release(budget)
		}
		return true
	})
}

// post creates a run and returns how many bytes the answer had.
func post(url, body string) (int64, error) {
	req, err := http.NewRequest(http.MethodPost, url+"/v1/runs", strings.NewReader(body))
	if err != nil {
		return 0, err
	}
	req.Header.Set("Authorization", "Bearer "+memberSecret)
	req.Header.Set("Content-Type", "application/json")
	transport := &http.Transport{DisableKeepAlives: true}
	resp, err := transport.RoundTrip(req)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusAccepted {
		b, _ := io.ReadAll(resp.Body)
		return 0, fmt.Errorf("status %d: %.200s", resp.StatusCode, b)
	}
	return io.Copy(io.Discard, resp.Body)
}

// TestABodyIsCopiedOnce: reading a request allocates its body and what is read of it, and no further copy of its files.
func TestABodyIsCopiedOnce(t *testing.T) {
	for _, encoding := range []string{"", `"encoding":"base64",`} {
		body := []byte(`{"command":"true","files":[{"path":"a",` + encoding + `"content":"` + strings.Repeat("QUJD", 1<<20) + `"}]}`)
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		whole, err := readLimited(bytes.NewReader(body), int64(len(body)), 16<<20)
		if err != nil {
			t.Fatal(err)
		}
		spec, err := parseSpec(whole, rules{})
		if err != nil {
			t.Fatal(err)
		}
		if _, _, err := fingerprint(spec); err != nil {
			t.Fatal(err)
		}
		runtime.ReadMemStats(&after)
		if n := after.TotalAlloc - before.TotalAlloc; n > uint64(2*len(body)+256<<10) {
			t.Errorf("%q: %d KiB allocated for a body of %d KiB", encoding, n>>10, len(body)>>10)
		}
	}
}

// TestLargeAnswersWaitForRoom: while a client that does not read holds all memory for answers, another's large one is refused,
// a small one is not; when the client is gone, the next is served.
func TestLargeAnswersWaitForRoom(t *testing.T) {
	record := run.Run{ID: testRun, State: run.Queued, Request: &run.Spec{Command: "true", Files: []run.File{{Path: "a", Content: strings.Repeat("x", 8<<20)}}}}
	store := &fakeStore{get: func(run.ID) (run.Run, error) { return record, nil }, account: func() (run.Account, error) { return run.Account{}, nil }}
	s := serve(t, Config{BodyMemory: 8 << 20, StoreTimeout: 200 * time.Millisecond}, Deps{Store: store})
	slow, err := net.Dial("tcp", s.addr)
	if err != nil {
		t.Fatal(err)
	}
	defer slow.Close()
	path := "/v1/runs/" + string(testRun)
	fmt.Fprintf(slow, "GET %s HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\n\r\n", path, memberSecret)
	if _, err := slow.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	if p := s.member(t, "GET", path, "").problem(t); p.Code != CodeUnavailable {
		t.Errorf("while the memory is taken: %+v", p)
	}
	if a := s.member(t, "GET", "/v1/account", ""); a.StatusCode != 200 {
		t.Errorf("a small answer: %d", a.StatusCode)
	}
	slow.Close()
	eventually(t, "room again", func() bool {
		a := s.member(t, "GET", path, "")
		return a.StatusCode == 200 && len(a.body) > 8<<20 && a.ContentLength == int64(len(a.body))
	})
	if a := s.member(t, "HEAD", path, ""); a.StatusCode != 200 || a.body != "" || a.ContentLength < 8<<20 {
		t.Errorf("HEAD: %d, %d bytes of %d", a.StatusCode, len(a.body), a.ContentLength)
	}
	if !s.answers.TryAcquire(8 << 20) {
		t.Error("memory is not given back")
	}
}

// TestLargePagesOfEventsWaitForRoom: pages of events count as runs do.
func TestLargePagesOfEventsWaitForRoom(t *testing.T) {
	event := run.Event{Seq: 1, Type: run.EventShell, Data: run.ShellData{Output: strings.Repeat("x", 4<<20)}}
	var events atomic.Pointer[[]run.Event]
	events.Store(&[]run.Event{event})
	store := &fakeStore{get: func(id run.ID) (run.Run, error) { return run.Run{ID: id, State: run.Running}, nil },
		events: func(int64) ([]run.Event, error) { return *events.Load(), nil }}
	s := serve(t, Config{BodyMemory: 9 << 20, StoreTimeout: time.Second}, Deps{Store: store})
	path := "/v1/runs/" + string(testRun) + "/events"
	if !s.answers.TryAcquire(8 << 20) {
		t.Fatal("no memory")
	}
	if p := s.member(t, "GET", path, "").problem(t); p.Code != CodeUnavailable {
		t.Errorf("while the memory is taken: %+v", p)
	}
	events.Store(&[]run.Event{{Seq: 1, Type: run.EventQueued, Data: run.QueuedData{}}})
	if a := s.member(t, "GET", path, ""); a.StatusCode != 200 {
		t.Errorf("a small page: %d", a.StatusCode)
	}
	events.Store(&[]run.Event{event})
	time.AfterFunc(500*time.Millisecond, func() { // the page has grown when it is made again
		events.Store(&[]run.Event{event, event})
		s.answers.Release(8 << 20)
	})
	if a := s.member(t, "GET", path, ""); a.StatusCode != 200 || len(a.body) < 8<<20 || a.ContentLength != int64(len(a.body)) {
		t.Errorf("when there is room: %d, %d bytes", a.StatusCode, len(a.body))
	}
	eventually(t, "all memory is given back", func() bool {
		if !s.answers.TryAcquire(9 << 20) {
			return false
		}
		s.answers.Release(9 << 20)
		return true
	})
}

// TestViewOfALargeRun: who may see a part of a run gets no more of it when the answer had to wait and was read again.
func TestViewOfALargeRun(t *testing.T) {
	record := run.Run{ID: testRun, Node: "secret", State: run.Queued, Request: &run.Spec{Command: strings.Repeat("x", 1<<20)}}
	s := serve(t, Config{BodyMemory: 1 << 20}, Deps{Store: &fakeStore{get: func(run.ID) (run.Run, error) { return record, nil }}})
	for _, waits := range []bool{false, true} {
		if waits {
			if !s.answers.TryAcquire(1) {
				t.Fatal("memory is not given back")
			}
			time.AfterFunc(50*time.Millisecond, func() { s.answers.Release(1) })
		}
		c := s.app.AcquireCtx(&fasthttp.RequestCtx{})
		if err := s.sendView(c, "o", http.StatusOK, record, sharedView); err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(c.Response().BodyStream())
		if err != nil || len(body) < 1<<20 || strings.Contains(string(body), "secret") {
			t.Errorf("waits %v: %d bytes, %v", waits, len(body), err)
		}
		if err := c.Response().CloseBodyStream(); err != nil {
			t.Error(err)
		}
		s.app.ReleaseCtx(c)
	}
}

// TestBase64SizeProperty: what is decoded in pieces is what is decoded at once.
func TestBase64SizeProperty(t *testing.T) {
	check := func(t *rapid.T, s string) {
		want, err := base64.StdEncoding.Strict().DecodeString(s)
		valid := err == nil && !strings.ContainsAny(s, "\r\n")
		if n, ok := base64Size(s); ok != valid || ok && n != len(want) {
			t.Fatalf("%.40q of %d: %d, %v; want %d, %v", s, len(s), n, ok, len(want), valid)
		}
	}
	rapid.Check(t, func(t *rapid.T) {
		around := rapid.IntRange(0, 3).Draw(t, "pieces")*base64Piece/4*3 + rapid.IntRange(0, 8).Draw(t, "more")
		s := base64.StdEncoding.EncodeToString(make([]byte, around))
		check(t, s)
		at := rapid.IntRange(0, len(s)).Draw(t, "at")
		check(t, s[:at]+rapid.SampledFrom([]string{"=", "==", "A", "QQ==", "AAB=", "\n", "-", "\x00"}).Draw(t, "odd")+s[at:])
		check(t, rapid.StringMatching(`[A-Za-z0-9+/=\n]{0,12}`).Draw(t, "any"))
	})
	check2 := strings.Repeat("A", base64Piece-4) + "AA=="
	if _, ok := base64Size(check2 + check2); ok {
		t.Error("padding within is accepted")
	}
}
