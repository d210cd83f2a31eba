package e2e

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"strings"
	"testing"
	"time"

	"github.com/ephemeral-run/ephemeral/client"
	"github.com/ephemeral-run/ephemeral/run"
)

// bytesOf is what a stream of a result holds.
func bytesOf(t *testing.T, s *run.Stream) []byte {
	t.Helper()
	if s == nil {
		t.Fatal("no stream")
	}
	if s.Encoding == "" {
		return []byte(s.Content)
	}
	b, err := base64.StdEncoding.DecodeString(s.Content)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestCommand(t *testing.T) {
	t.Parallel()
	n := shared.tenant(t, 1_000_000)
	tests := map[string]struct {
		command        string
		exit           int
		stdout, stderr string
	}{
		"streams apart":          {`printf out; printf err >&2; exit 3`, 3, "out", "err"},
		"nothing":                {`true`, 0, "", ""},
		"no final newline":       {`printf 'a\n\n\nb'`, 0, "a\n\n\nb", ""},
		"only newlines":          {`printf '\n\n'`, 0, "\n\n", ""},
		"NUL bytes":              {`printf 'a\0b\0'`, 0, "a\x00b\x00", ""},
		"bytes that are no text": {`printf '\377\376\0\300'`, 0, "\xff\xfe\x00\xc0", ""},
		"characters split":       {`printf '\303'; sleep 0.3; printf '\251\342\202'; sleep 0.3; printf '\254'`, 0, "é€", ""},
		"killed by a signal":     {`kill -9 $$`, 137, "", ""},
		"not found":              {`/nonexistent`, 127, "", "/bin/sh: 1: /nonexistent: not found\n"},
		"background child":       {`echo begun; sleep 1000 & exit 0`, 0, "begun\n", ""},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := n.finish(t, client.Request{Command: tt.command})
			if r.State != run.Succeeded || r.Result == nil || r.Result.ExitCode == nil {
				t.Fatalf("ended %s, error %+v, result %+v", r.State, r.Error, r.Result)
			}
			if *r.Result.ExitCode != tt.exit {
				t.Errorf("exit code %d, want %d", *r.Result.ExitCode, tt.exit)
			}
			for _, s := range []struct {
				name string
				got  *run.Stream
				want string
			}{{"stdout", r.Result.Stdout, tt.stdout}, {"stderr", r.Result.Stderr, tt.stderr}} {
				if got := bytesOf(t, s.got); string(got) != s.want || s.got.Bytes != int64(len(s.want)) || s.got.Truncated {
					t.Errorf("%s is %q (%+v), want %q", s.name, got, s.got, s.want)
				}
			}
			if r.Usage.ModelCalls != 0 || r.Money.Model != 0 {
				t.Errorf("a command used a model: %+v, %+v", r.Usage, r.Money)
			}
			checkRecord(t, r)
			checkMoney(t, r, r.Money.Reserved)
		})
	}
}

// TestLargeOutput has a command write 10 MB of bytes that are no text to each stream.
func TestLargeOutput(t *testing.T) {
	t.Parallel()
	n := shared.tenant(t, 1_000_000)
	r := n.finish(t, client.Request{Command: `python3 -c '
import sys, random
for stream, seed in ((sys.stdout, 1), (sys.stderr, 2)):
    stream.buffer.write(random.Random(seed).randbytes(10_000_000))
    stream.flush()
'`, TimeoutSeconds: 80})
	if r.State != run.Succeeded || r.Result == nil || r.Result.Stdout == nil {
		t.Fatalf("ended %s, error %+v", r.State, r.Error)
	}
	// The sums are those of Python's generator for the two seeds, made by the same program in a second run.
	sums := n.finish(t, client.Request{Command: `python3 -c '
import hashlib, random
for seed in (1, 2): print(hashlib.sha256(random.Random(seed).randbytes(10_000_000)).hexdigest())
'`, TimeoutSeconds: 80})
	want := strings.Fields(string(bytesOf(t, sums.Result.Stdout)))
	for i, s := range []*run.Stream{r.Result.Stdout, r.Result.Stderr} {
		b := bytesOf(t, s)
		sum := sha256.Sum256(b)
		if len(b) != 10_000_000 || s.Truncated || hex.EncodeToString(sum[:]) != want[i] {
			t.Errorf("stream %d: %d bytes, truncated %v, sum %x, want %s", i, len(b), s.Truncated, sum, want[i])
		}
	}
}

func TestFiles(t *testing.T) {
	t.Parallel()
	n := shared.tenant(t, 1_000_000)
	r := n.finish(t, client.Request{
		Command: `sha256sum < a.csv; cat 'dir/ü n.txt'; wc -c < empty; stat -c '%U %a' a.csv`,
		Files: []run.File{
			{Path: "a.csv", Content: base64.StdEncoding.EncodeToString([]byte{0, 255, 10}), Encoding: "base64"},
			{Path: "dir/ü n.txt", Content: "text\n"},
			{Path: "empty"},
		},
	})
	sum := sha256.Sum256([]byte{0, 255, 10})
	want := hex.EncodeToString(sum[:]) + "  -\ntext\n0\nworker 644\n"
	if r.State != run.Succeeded || string(bytesOf(t, r.Result.Stdout)) != want {
		t.Errorf("ended %s, %+v:\n%s\nwant\n%s", r.State, r.Error, bytesOf(t, r.Result.Stdout), want)
	}
}

// TestTimeoutAndCancel end a command that has started processes in sessions of their own.
func TestTimeoutAndCancel(t *testing.T) {
	t.Parallel()
	n := shared.tenant(t, 1_000_000)
	const command = `echo begun; sleep 1000 & setsid sleep 1000`
	t.Run("timeout", func(t *testing.T) {
		t.Parallel()
		r := n.finish(t, client.Request{Command: command, TimeoutSeconds: 2})
		if r.State != run.TimedOut || r.Error == nil || r.Error.Code != "timed_out" {
			t.Errorf("ended %s, %+v; want timed_out", r.State, r.Error)
		}
		if got := bytesOf(t, r.Result.Stdout); !bytes.Equal(got, []byte("begun\n")) {
			t.Errorf("stdout so far is %q", got)
		}
		if took := r.EndedAt.Sub(*r.StartedAt); took < 2*time.Second {
			t.Errorf("ended %s after the start, before its time", took)
		}
		n.gone(t, r)
	})
	t.Run("cancel", func(t *testing.T) {
		t.Parallel()
		ctx, cancel := context.WithTimeout(t.Context(), runLimit)
		defer cancel()
		created, err := n.CreateRun(ctx, client.Request{Command: command}, client.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		n.until(t, created.Run.ID, run.EventWorkerStarted)
		if _, err := n.Cancel(ctx, created.Run.ID); err != nil {
			t.Fatal(err)
		}
		r := n.ended(t, created.Run.ID)
		if r.State != run.Cancelled {
			t.Errorf("ended %s, %+v; want cancelled", r.State, r.Error)
		}
		n.gone(t, r)
		again, err := n.Cancel(ctx, created.Run.ID)
		if err != nil || again.State != run.Cancelled {
			t.Errorf("cancelled again: %s, %v", again.State, err)
		}
	})
}

// gone checks that nothing is left of an ended run's machine, and that its money adds up.
func (n *tenant) gone(t *testing.T, r run.Run) {
	t.Helper()
	checkRecord(t, r)
	checkMoney(t, r, r.Money.Reserved)
	if left := n.server.leftOf(t, r.Machine); len(left) > 0 {
		t.Errorf("left of machine %s: %v", r.Machine, left)
	}
}

// TestBudgetEndsACommand has a hold that pays for two seconds of compute.
func TestBudgetEndsACommand(t *testing.T) {
	t.Parallel()
	n := shared.tenant(t, 1_000_000)
	r := n.finish(t, client.Request{Command: "sleep 1000", MaxCostMicros: 500})
	if r.State != run.BudgetExhausted || r.Money.Charged != 400 {
		t.Errorf("ended %s with %+v, want budget_exhausted with 400 charged", r.State, r.Money)
	}
	n.gone(t, r)
}

// TestDroppedPacketsAreReported sends packets that have nowhere to go.
func TestDroppedPacketsAreReported(t *testing.T) {
	t.Parallel()
	n := shared.tenant(t, 1_000_000)
	r := n.finish(t, client.Request{Command: `python3 -c '
import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for i in range(50): s.sendto(b"out", ("192.0.2.1", 9))
s.sendto(bytes.fromhex("000101000001000000000000076578616d706c6503636f6d0000010001"), ("192.0.2.53", 53))
t = socket.socket(); t.settimeout(0.2)
try: t.connect(("192.0.2.2", 443))
except OSError: pass
'`})
	if r.State != run.Succeeded || *r.Result.ExitCode != 0 {
		t.Fatalf("ended %s, %+v, %s", r.State, r.Error, bytesOf(t, r.Result.Stderr))
	}
	if r.Egress.DroppedPackets < 50 || r.Egress.DroppedBytes < 50*3 {
		t.Errorf("dropped %+v, want at least 50 packets", r.Egress)
	}
	told := map[run.EgressAttempt]bool{}
	if r.EgressAttempts != nil {
		for _, a := range r.EgressAttempts.List {
			if a.Packets >= 1 && a.Protocol == "tcp" { // a connection that is not answered is tried again
				a.Packets = 1
			}
			told[a] = true
		}
	}
	for _, want := range []run.EgressAttempt{
		{Protocol: "udp", Address: "192.0.2.1", Port: 9, Packets: 50}, {Protocol: "tcp", Address: "192.0.2.2", Port: 443, Packets: 1},
		{Protocol: "udp", Address: "192.0.2.53", Port: 53, Name: "example.com", Packets: 1},
	} {
		if !told[want] {
			t.Errorf("%+v is not told: %+v", want, r.EgressAttempts)
		}
	}
	for _, e := range n.events(t, r.ID) {
		if d, ok := e.Data.(run.MicroVMDestroyedData); ok && d.Egress != r.Egress {
			t.Errorf("microvm.destroyed says %+v, the record %+v", d.Egress, r.Egress)
		}
	}
}
