package broker_test

import (
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"os/user"
	"strings"
	"testing"
	"time"

	"github.com/ephemeral-run/ephemeral/broker"
	"github.com/ephemeral-run/ephemeral/guestagent/worker"
	"github.com/ephemeral-run/ephemeral/run"
)

// hostShell runs commands with the host's sh in a directory of its own.
func hostShell(t *testing.T) (dir string, do func(context.Context, string, time.Duration) worker.Output) {
	dir = t.TempDir()
	return dir, func(ctx context.Context, command string, timeout time.Duration) worker.Output {
		ctx, cancel := context.WithTimeout(ctx, timeout)
		defer cancel()
		cmd := exec.CommandContext(ctx, "sh", "-c", command)
		cmd.Dir = dir
		out, err := cmd.CombinedOutput()
		if err != nil && cmd.ProcessState == nil {
			t.Errorf("%s: %v", command, err)
			return worker.Output{Outcome: "not_found", ExitCode: 127}
		}
		return worker.Output{Outcome: "exited", ExitCode: cmd.ProcessState.ExitCode(), Output: out, Bytes: int64(len(out))}
	}
}

// TestSandboxProof plays the built-in conversation with the real worker and a real shell: every part of the answer comes
// from the machine that ran the commands.
func TestSandboxProof(t *testing.T) {
	b := newBroker(t, broker.Config{})
	l := newLedger(40_000)
	s := startSession(t, b, l, &run.Spec{Prompt: "p", Model: "replay/sandbox-proof", Shell: true})
	dir, shell := hostShell(t)
	var commands []string
	result := worker.Run(t.Context(), worker.Config{
		Prompt: "p", Model: "replay/sandbox-proof", Shell: true, HTTP: s.client(),
		Exec: func(ctx context.Context, c worker.Command) worker.Output {
			commands = append(commands, c.Text)
			return shell(ctx, c.Text, c.Timeout)
		},
	})
	t.Cleanup(func() { os.Remove("/tmp/proof.txt") })
	s.stop()
	if !result.OK {
		t.Fatalf("result: %+v", result)
	}
	me, err := user.Current()
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"1. Prime script output: 2 3 5 7 11 13 17 19 23 29 31 37 41 43 47\n",
		"2. whoami: " + me.Username + "; pwd: " + dir + "\n",
		"3. curl error: ",
		"4. /tmp/proof.txt created; ls -l: -rw",
		" 14 ",
		"\nThe network call ",
	} {
		if !strings.Contains(result.Output, want) {
			t.Errorf("no %q in:\n%s", want, result.Output)
		}
	}
	want := []string{"pwd; whoami", "command -v curl && curl -sS -m 8 https://example.com", "", `printf 'sandbox proof\n' > /tmp/proof.txt && ls -l /tmp/proof.txt`}
	for i := range want {
		if len(commands) != 4 || want[i] != "" && commands[i] != want[i] {
			t.Fatalf("commands: %q", commands)
		}
	}
	if !strings.Contains(commands[2], "while len(primes) < 15:") || strings.Contains(commands[2], "47") {
		t.Errorf("the prime command is canned: %s", commands[2])
	}
	if got, want := s.handler.Usage(), (run.Usage{ModelCalls: 3, InputTokens: 4870, OutputTokens: 344, TotalTokens: 5214}); got != want {
		t.Errorf("usage %+v, want %+v", got, want)
	}
	if err := l.check(); err != nil || l.total() != 330 {
		t.Errorf("charged %v, want $0.00033; %v", l.total(), err)
	}
	events := s.events()
	if len(events) != 3 || events[0].Charged != 95 || events[1].Charged != 147 || events[2].Charged != 88 || events[0].Status != 200 {
		t.Errorf("events %+v", events)
	}
	if out, err := json.Marshal(events); err != nil || strings.Contains(string(out), "primes") {
		t.Errorf("events hold content: %s %v", out, err)
	}
}

// TestSandboxProofIsNotCanned changes what the machine says and expects another answer.
func TestSandboxProofIsNotCanned(t *testing.T) {
	b := newBroker(t, broker.Config{})
	s := startSession(t, b, newLedger(40_000), &run.Spec{Prompt: "p", Model: "replay/sandbox-proof", Shell: true})
	result := worker.Run(t.Context(), worker.Config{
		Prompt: "p", Model: "replay/sandbox-proof", Shell: true, HTTP: s.client(),
		Exec: func(_ context.Context, c worker.Command) worker.Output {
			command := c.Text
			switch {
			case strings.HasPrefix(command, "pwd"):
				return worker.Output{Outcome: "exited", Output: []byte("/elsewhere\nsomebody\n")}
			case strings.HasPrefix(command, "command -v curl"):
				return worker.Output{Outcome: "exited", Output: []byte("/bin/curl\n<html>hello</html>\n")}
			case strings.Contains(command, "primes"):
				return worker.Output{Outcome: "exited", Output: []byte("2 3 5\n")}
			}
			return worker.Output{Outcome: "exited", ExitCode: 1, Output: []byte("sh: cannot create /tmp/proof.txt: Permission denied\n")}
		},
	})
	want := `1. Prime script output: 2 3 5
2. whoami: somebody; pwd: /elsewhere
3. curl error: none
4. /tmp/proof.txt not created: sh: cannot create /tmp/proof.txt: Permission denied (exit code 1)

The network call succeeded.`
	if !result.OK || result.Output != want {
		t.Errorf("%+v", result)
	}
}
