package guest

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"math"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/containerd/ttrpc"

	"github.com/ephemeral-run/ephemeral/guestagent/proto"
)

// liar is an agent that says what a test wants.
type liar struct {
	clock    time.Duration // ahead of the host's
	drift    time.Duration // added after Prepare
	slow     time.Duration // how late it sets its clock, at first
	mends    bool          // its drift ends when its clock is set: it was the host that measured badly
	set      int           // how often its clock was set
	prepare  *proto.PrepareResponse
	exec     func(proto.Agent_ExecServer) error
	worker   func(proto.Agent_StartWorkerServer) error
	get      func(proto.Agent_GetFileServer) error
	put      *proto.PutFileResponse
	collect  func(proto.Agent_CollectServer) error
	prepared bool
}

func (l *liar) now() int64 {
	if l.prepared {
		return time.Now().Add(l.drift).UnixNano()
	}
	return time.Now().Add(l.clock).UnixNano()
}

func (l *liar) Ping(context.Context, *proto.PingRequest) (*proto.PingResponse, error) {
	return &proto.PingResponse{ClockUnixNanos: l.now()}, nil
}

func (l *liar) Prepare(_ context.Context, r *proto.PrepareRequest) (*proto.PrepareResponse, error) {
	l.prepared = true
	l.clock += time.Duration(r.ClockStepNanos)
	response := &proto.PrepareResponse{Reseeded: l.prepare.Reseeded, Scratch: l.prepare.Scratch, ClockUnixNanos: l.now()}
	return response, nil
}

func (l *liar) SetClock(_ context.Context, r *proto.SetClockRequest) (*proto.SetClockResponse, error) {
	time.Sleep(l.slow)
	l.slow = 0
	if l.mends {
		l.drift += time.Duration(r.ClockStepNanos)
	}
	if l.set++; r.ClockStepNanos != 0 {
		l.clock += time.Duration(r.ClockStepNanos)
	} else {
		l.clock = time.Until(time.Unix(0, r.ClockUnixNanos))
	}
	return &proto.SetClockResponse{ClockUnixNanos: l.now()}, nil
}

func (l *liar) StartWorker(_ context.Context, _ *proto.StartWorkerRequest, s proto.Agent_StartWorkerServer) error {
	return l.worker(s)
}
func (l *liar) Exec(_ context.Context, s proto.Agent_ExecServer) error { return l.exec(s) }
func (l *liar) PutFile(_ context.Context, s proto.Agent_PutFileServer) (*proto.PutFileResponse, error) {
	for {
		if _, err := s.Recv(); err != nil {
			return l.put, nil
		}
	}
}
func (l *liar) GetFile(_ context.Context, _ *proto.GetFileRequest, s proto.Agent_GetFileServer) error {
	return l.get(s)
}
func (l *liar) Collect(_ context.Context, _ *proto.CollectRequest, s proto.Agent_CollectServer) error {
	return l.collect(s)
}
func (l *liar) Kill(context.Context, *proto.KillRequest) (*proto.KillResponse, error) {
	return &proto.KillResponse{}, nil
}
func (l *liar) Shutdown(context.Context, *proto.ShutdownRequest) (*proto.ShutdownResponse, error) {
	return &proto.ShutdownResponse{}, nil
}

func (l *liar) OpenDoor(context.Context, *proto.OpenDoorRequest) (*proto.OpenDoorResponse, error) {
	return &proto.OpenDoorResponse{}, nil
}
func (l *liar) Conclude(context.Context, *proto.ConcludeRequest) (*proto.ConcludeResponse, error) {
	return &proto.ConcludeResponse{}, nil
}

func believe(t *testing.T, l *liar) *Client {
	t.Helper()
	host, guest := pair(t)
	rpc, err := ttrpc.NewServer()
	if err != nil {
		t.Fatal(err)
	}
	proto.RegisterAgentService(rpc, l)
	serve(t, guest, func(ctx context.Context, listener net.Listener) error {
		defer context.AfterFunc(ctx, func() { _ = rpc.Close() })()
		return rpc.Serve(ctx, listener)
	})
	return Connect(host.Dial)
}

const goodScratch = "/tmp/ephemeral-run-aB3dE6/scratch"

func TestLyingPrepare(t *testing.T) {
	good := func() *liar {
		return &liar{clock: -time.Hour, prepare: &proto.PrepareResponse{Reseeded: true, Scratch: goodScratch}}
	}
	if p, err := believe(t, good()).Prepare(ctx(t), identity); err != nil || p.Scratch != goodScratch {
		t.Fatalf("honest: %+v, %v", p, err)
	}
	for name, lie := range map[string]func(*liar){
		"not reseeded":  func(l *liar) { l.prepare.Reseeded = false },
		"clock ahead":   func(l *liar) { l.drift = 60 * time.Millisecond },
		"clock behind":  func(l *liar) { l.drift = -60 * time.Millisecond },
		"clock absurd":  func(l *liar) { l.drift = 1 << 62 },
		"no scratch":    func(l *liar) { l.prepare.Scratch = "" },
		"other scratch": func(l *liar) { l.prepare.Scratch = goodScratch + "/../../../etc" },
	} {
		t.Run(name, func(t *testing.T) {
			l := good()
			lie(l)
			if _, err := believe(t, l).Prepare(ctx(t), identity); !errors.Is(err, ErrNotPrepared) {
				t.Errorf("got %v", err)
			}
		})
	}
}

// TestPrepareOnABusyHost: a clock that was set by a bad measurement is set again, and the machine is not given up for it.
func TestPrepareOnABusyHost(t *testing.T) {
	l := &liar{drift: -176 * time.Millisecond, mends: true, prepare: &proto.PrepareResponse{Reseeded: true, Scratch: goodScratch}}
	p, err := believe(t, l).Prepare(ctx(t), identity)
	if err != nil || p.ClockError.Abs() > MaxClockError || l.set == 0 {
		t.Errorf("%+v, %v; set %d times", p, err, l.set)
	}
}

// TestAnAbsurdClockIsNotRight: however far off the guest says it is.
func TestAnAbsurdClockIsNotRight(t *testing.T) {
	for _, ahead := range []time.Duration{math.MinInt64, math.MaxInt64, math.MaxInt64 - 1} {
		if s := (sample{ahead: ahead, roundTrip: time.Second}); s.off() <= MaxClockError {
			t.Errorf("a clock that is %v ahead is off by %v", ahead, s.off())
		}
	}
}

func TestLyingSetClock(t *testing.T) {
	for name, c := range map[string]struct {
		liar liar
		set  int
		err  error
	}{
		"honest":         {liar{clock: -time.Hour}, 1, nil},
		"slow":           {liar{clock: -time.Hour, slow: 150 * time.Millisecond}, 2, nil},
		"ahead":          {liar{prepared: true, drift: 60 * time.Millisecond}, 1 + maxCorrections, ErrNotPrepared},
		"behind":         {liar{prepared: true, drift: -60 * time.Millisecond}, 1 + maxCorrections, ErrNotPrepared},
		"absurd":         {liar{prepared: true, drift: 1 << 62}, 1 + maxCorrections, ErrNotPrepared},
		"absurdly early": {liar{prepared: true, drift: -1 << 63}, 1 + maxCorrections, ErrNotPrepared},
	} {
		t.Run(name, func(t *testing.T) {
			if err := believe(t, &c.liar).SetClock(ctx(t)); !errors.Is(err, c.err) {
				t.Errorf("%v, want %v", err, c.err)
			}
			if c.liar.set != c.set && !(name == "honest" && c.liar.set == 2) { // a busy host measures too
				t.Errorf("set %d times, want %d", c.liar.set, c.set)
			}
		})
	}
}

func stdout(p []byte) *proto.ExecResponse {
	return &proto.ExecResponse{Response: &proto.ExecResponse_Stdout{Stdout: p}}
}

func exit(e *proto.Exit) *proto.ExecResponse {
	return &proto.ExecResponse{Response: &proto.ExecResponse_Exit{Exit: e}}
}

func TestLyingExec(t *testing.T) {
	for name, responses := range map[string][]*proto.ExecResponse{
		"nothing":           nil,
		"no exit":           {stdout([]byte("x"))},
		"empty output":      {stdout(nil), exit(&proto.Exit{Outcome: "exited"})},
		"large output":      {stdout(make([]byte, maxChunk+1)), exit(&proto.Exit{Outcome: "exited", StdoutBytes: maxChunk + 1})},
		"beyond the limit":  {stdout(make([]byte, 60)), stdout(make([]byte, 60)), exit(&proto.Exit{Outcome: "exited", StdoutBytes: 120})},
		"no such outcome":   {exit(&proto.Exit{Outcome: "won"})},
		"no outcome":        {exit(&proto.Exit{})},
		"code":              {exit(&proto.Exit{Outcome: "exited", Code: 256})},
		"negative code":     {exit(&proto.Exit{Outcome: "exited", Code: -1})},
		"success of a kill": {exit(&proto.Exit{Outcome: "killed"})},
		"success of a miss": {exit(&proto.Exit{Outcome: "not_found"})},
		"lost bytes":        {stdout([]byte("x")), exit(&proto.Exit{Outcome: "exited", StdoutBytes: 2})},
		"invented bytes":    {stdout([]byte("x")), exit(&proto.Exit{Outcome: "exited"})},
		"truncated nothing": {exit(&proto.Exit{Outcome: "exited", StdoutTruncated: true})},
		"negative bytes":    {exit(&proto.Exit{Outcome: "exited", StderrBytes: -1, StderrTruncated: true})},
		"long detail":       {exit(&proto.Exit{Outcome: "exited", Detail: strings.Repeat("x", maxDetail+1)})},
		"input credit":      {{Response: &proto.ExecResponse_StdinCredit{StdinCredit: 1}}, exit(&proto.Exit{Outcome: "exited"})},
		"empty response":    {{}, exit(&proto.Exit{Outcome: "exited"})},
		"huge message":      {stdout(make([]byte, 3<<20))},
	} {
		t.Run(name, func(t *testing.T) {
			c := believe(t, &liar{exec: func(s proto.Agent_ExecServer) error {
				for _, r := range responses {
					if err := s.Send(r); err != nil {
						return err
					}
				}
				return nil
			}})
			got, err := c.Exec(ctx(t), Command{Args: []string{"x"}, OutputLimit: 100}, nil, nil)
			if name == "large output" {
				got, err = c.Exec(ctx(t), Command{Args: []string{"x"}}, nil, nil)
			}
			if !errors.Is(err, ErrLost) || got.Outcome != "" {
				t.Errorf("got %+v, %v", got, err)
			}
		})
	}
}

func TestFloodOfOutputWithoutCredit(t *testing.T) {
	c := believe(t, &liar{exec: func(s proto.Agent_ExecServer) error {
		for {
			if err := s.Send(stdout([]byte("x"))); err != nil {
				return err
			}
		}
	}})
	taken := 0
	_, err := c.Exec(ctx(t), Command{Args: []string{"x"}}, writerFunc(func(p []byte) (int, error) {
		taken++
		time.Sleep(10 * time.Millisecond)
		return len(p), nil
	}), nil)
	if !errors.Is(err, ErrLost) || taken > 10*firstCredit {
		t.Errorf("%d taken, %v", taken, err)
	}
}

func shellEvent(s *proto.ShellEvent) *proto.WorkerEvent {
	return &proto.WorkerEvent{Event: &proto.WorkerEvent_Shell{Shell: s}}
}

func finishedEvent(f *proto.Finished) *proto.WorkerEvent {
	return &proto.WorkerEvent{Event: &proto.WorkerEvent_Finished{Finished: f}}
}

func TestLyingWorker(t *testing.T) {
	good := &proto.Exit{Outcome: "exited"}
	for name, events := range map[string][]*proto.WorkerEvent{
		"nothing":         nil,
		"no end":          {shellEvent(&proto.ShellEvent{Command: "x", Exit: good})},
		"no exit":         {shellEvent(&proto.ShellEvent{Command: "x"})},
		"empty event":     {{}},
		"long command":    {shellEvent(&proto.ShellEvent{Command: strings.Repeat("x", maxShellCommand+1), Exit: good})},
		"much output":     {shellEvent(&proto.ShellEvent{Output: make([]byte, maxShellOutput+1), OutputBytes: 1 << 20, Exit: good})},
		"invented output": {shellEvent(&proto.ShellEvent{Output: []byte("xy"), OutputBytes: 1, Exit: good})},
		"duration":        {shellEvent(&proto.ShellEvent{DurationNanos: -1, Exit: good})},
		"long answer":     {finishedEvent(&proto.Finished{Ok: true, Output: strings.Repeat("x", maxAnswer+1)})},
		"two ways":        {finishedEvent(&proto.Finished{Ok: true, ErrorCode: "model_error"})},
		"no way":          {finishedEvent(&proto.Finished{})},
		"own code":        {finishedEvent(&proto.Finished{ErrorCode: "bankrupt"})},
	} {
		t.Run(name, func(t *testing.T) {
			c := believe(t, &liar{worker: func(s proto.Agent_StartWorkerServer) error {
				for _, e := range events {
					if err := s.Send(e); err != nil {
						return err
					}
				}
				return nil
			}})
			got, err := c.StartWorker(ctx(t), Worker{Prompt: "x", Model: "m"}, func(Shell) error { return nil })
			if !errors.Is(err, ErrLost) || got != (Finished{}) {
				t.Errorf("got %+v, %v", got, err)
			}
		})
	}
}

func TestWorkerEvents(t *testing.T) {
	c := believe(t, &liar{worker: func(s proto.Agent_StartWorkerServer) error {
		for range 300 { // more than the ttrpc client keeps for a reader that is late
			if err := s.Send(shellEvent(&proto.ShellEvent{Command: "x", DurationNanos: 1 << 60, Exit: &proto.Exit{Outcome: "exited"}})); err != nil {
				return err
			}
		}
		return s.Send(finishedEvent(&proto.Finished{Ok: true, Output: "done"}))
	}})
	events := 0
	got, err := c.StartWorker(ctx(t), Worker{Prompt: "x", Model: "m"}, func(s Shell) error {
		if events++; events == 1 {
			time.Sleep(2 * time.Second)
		}
		if s.Duration > time.Minute {
			t.Errorf("a command took %v", s.Duration)
		}
		return nil
	})
	if err != nil || events != 300 || got != (Finished{OK: true, Output: "done"}) {
		t.Errorf("%d events, %+v, %v", events, got, err)
	}
	own := errors.New("enough")
	if _, err := c.StartWorker(ctx(t), Worker{Prompt: "x", Model: "m"}, func(Shell) error { return own }); !errors.Is(err, own) || errors.Is(err, ErrLost) {
		t.Errorf("got %v", err)
	}
}

func TestFloodOfWorkerEvents(t *testing.T) {
	c := believe(t, &liar{worker: func(s proto.Agent_StartWorkerServer) error {
		for {
			if err := s.Send(shellEvent(&proto.ShellEvent{Output: make([]byte, maxShellOutput), OutputBytes: maxShellOutput, Exit: &proto.Exit{Outcome: "exited"}})); err != nil {
				return err
			}
		}
	}})
	_, err := c.StartWorker(ctx(t), Worker{Prompt: "x", Model: "m"}, func(Shell) error { time.Sleep(10 * time.Millisecond); return nil })
	if !errors.Is(err, ErrLost) {
		t.Errorf("got %v", err)
	}
}

func TestLyingFiles(t *testing.T) {
	c := believe(t, &liar{put: &proto.PutFileResponse{Bytes: 4}, get: func(s proto.Agent_GetFileServer) error {
		for range 3 {
			if err := s.Send(&proto.GetFileResponse{Data: make([]byte, 50)}); err != nil {
				return err
			}
		}
		return nil
	}})
	if err := c.PutFile(ctx(t), "a", 0, strings.NewReader("12345")); !errors.Is(err, ErrLost) {
		t.Errorf("put: %v", err)
	}
	var got bytes.Buffer
	if err := c.GetFile(ctx(t), "a", 100, &got); !errors.Is(err, ErrLost) || got.Len() > 100 {
		t.Errorf("get: %d bytes, %v", got.Len(), err)
	}
	if err := c.GetFile(ctx(t), "a", 150, io.Discard); err != nil {
		t.Errorf("get: %v", err)
	}
}

// pipeConn gives the client an agent made of bytes.
func rawAgent(t testing.TB, answer []byte) *Client {
	return Connect(func(context.Context, uint32) (net.Conn, error) {
		host, guest := net.Pipe()
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			go func() { _, _ = io.Copy(io.Discard, guest) }()
			_, _ = guest.Write(answer)
			time.Sleep(5 * time.Millisecond)
			_ = guest.Close()
		}()
		t.Cleanup(func() { _ = host.Close(); <-ended })
		return host, nil
	})
}

func header(length, stream uint32, kind byte) []byte {
	h := make([]byte, headerSize)
	binary.BigEndian.PutUint32(h, length)
	binary.BigEndian.PutUint32(h[4:], stream)
	h[8] = kind
	return h
}

func TestGuardRefuses(t *testing.T) {
	for name, answer := range map[string][]byte{
		"oversized":    header(maxMessage+1, 1, typeResponse),
		"other stream": header(0, 3, typeResponse),
		"request":      header(0, 1, 1),
		"garbage":      []byte("HTTP/1.1 400 Bad Request\r\n\r\n"),
		"cut":          header(10, 1, typeResponse)[:5],
		"nothing":      nil,
		"not protobuf": append(header(4, 1, typeResponse), 0xff, 0xff, 0xff, 0xff),
	} {
		t.Run(name, func(t *testing.T) {
			if err := rawAgent(t, answer).Ping(ctx(t)); !errors.Is(err, ErrLost) {
				t.Errorf("got %v", err)
			}
		})
	}
}

// FuzzAgent lets the agent answer a command with any bytes: the client ends, and claims no success that was not said.
func FuzzAgent(f *testing.F) {
	f.Add(header(0, 1, typeResponse))
	f.Add(append(append(header(3, 1, typeData), 0x0a, 1, 'x'), header(12, 1, typeData)...))
	f.Add(append(header(10, 1, typeData), 0x22, 8, 0x0a, 6, 'e', 'x', 'i', 't', 'e', 'd'))
	f.Fuzz(func(t *testing.T, answer []byte) {
		c, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		exit, err := rawAgent(t, answer).Exec(c, Command{Args: []string{"x"}}, io.Discard, io.Discard)
		if c.Err() != nil {
			t.Fatal("the client hangs")
		}
		if err == nil && !outcomes[exit.Outcome] {
			t.Fatalf("accepted %+v", exit)
		}
		if err == nil && exit.Outcome == "exited" && !bytes.Contains(answer, []byte("exited")) {
			t.Fatalf("invented %+v", exit)
		}
	})
}

// FuzzGuard: how the bytes are split makes no difference.
func FuzzGuard(f *testing.F) {
	f.Add(append(header(2, 1, typeData), 1, 2), 3)
	f.Fuzz(func(t *testing.T, data []byte, cut int) {
		whole, split := newGuard(nil), newGuard(nil)
		whole.streaming(4)
		split.streaming(4)
		cut = max(0, min(cut, len(data)))
		werr := whole.check(data)
		serr := split.check(data[:cut])
		if serr == nil {
			serr = split.check(data[cut:])
		}
		if (werr == nil) != (serr == nil) {
			t.Fatalf("whole: %v, split: %v", werr, serr)
		}
	})
}
