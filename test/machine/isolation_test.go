package machine

import (
	"bufio"
	_ "embed"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/ephemeral-run/ephemeral/node/guest"
)

var (
	//go:embed testdata/attack.py
	attackScript string
	//go:embed testdata/ears.py
	earsScript string
)

// attack is the job of attack.py.
type attack struct {
	Mark    string   `json:"mark"`
	Ports   []int    `json:"ports"`
	V4      []string `json:"v4"`
	V6      []string `json:"v6"`
	Address string   `json:"address"`
	MAC     string   `json:"mac"`
	Peer    string   `json:"peer"`
	PeerMAC string   `json:"peer_mac"`
}

// outcome is what became of it.
type outcome struct {
	Sent    map[string]int `json:"sent"`
	Got     []string       `json:"got"`
	Refused map[string]int `json:"refused"`
}

// TestNothingGetsOut: whatever a machine sends, as its worker or as root, reaches neither the host nor another machine,
// nothing comes back, and the host counts it.
func TestNothingGetsOut(t *testing.T) {
	t.Parallel()
	h := commonHost(t)
	attacker, neighbour, idle := h.start(t), h.start(t), h.start(t)
	host := listenOnHost(t)
	mark := hex.EncodeToString(random(16))
	host.listenFor([]byte(mark))
	for _, m := range []*machine{attacker, neighbour} {
		mac, err := net.ParseMAC(m.identity.MAC)
		if err != nil {
			t.Fatal(err)
		}
		host.listenFor(mac)
	}
	peer := listenInMachine(t, neighbour, mark, host.ports)
	job := attack{
		Mark: mark, Ports: host.ports, Address: address(attacker), MAC: attacker.identity.MAC,
		Peer: address(neighbour), PeerMAC: neighbour.identity.MAC,
	}
	job.V4, job.V6 = hostAddresses(t)
	t.Logf("the host's addresses: %v %v", job.V4, job.V6)
	job.V4 = append(job.V4, address(neighbour), "169.254.169.254", "8.8.8.8", "192.0.2.1", "10.0.0.1", "172.17.0.1", "224.0.0.251", "255.255.255.255")
	job.V6 = append(job.V6, "ff02::1%eth0", "ff02::2%eth0", "fe80::1%eth0", "2001:db8::1", "2001:4860:4860::8888", "fd00:ec2::254", "64:ff9b::a9fe:a9fe", "::1")
	quiet := map[*machine]int64{neighbour: neighbour.packets(t), idle: idle.packets(t)}

	t.Run("worker", func(t *testing.T) { job.run(t, attacker, "worker", "IPv4 TCP", "IPv4 UDP", "IPv4 DNS", "IPv4 ICMP") })
	t.Run("root", func(t *testing.T) {
		job.run(t, attacker, "root", "IPv4 TCP", "IPv4 UDP", "IPv4 DNS", "IPv4 ICMP",
			"IPv6 TCP", "IPv6 UDP", "IPv6 DNS", "IPv6 ICMP", "raw IP", "frame", "ARP")
	})

	if heard := host.all(); len(heard) != 0 {
		t.Errorf("the host heard %v", heard)
	}
	peer.end(t)
	for m, before := range quiet {
		if now := m.packets(t); now != before {
			t.Errorf("an idle machine is said to have sent %d packets", now-before)
		}
	}
	host.prove(t, []byte(mark))
}

func address(m *machine) string { a, _, _ := strings.Cut(m.identity.Address, "/"); return a }

// run makes the attempts as a user and checks that none succeeded, that those named were really made, and that they are
// counted.
func (a attack) run(t *testing.T, m *machine, user string, kinds ...string) {
	t.Helper()
	input, err := json.Marshal(a)
	if err != nil {
		t.Fatal(err)
	}
	before := m.packets(t)
	var got outcome
	if err := json.Unmarshal([]byte(m.must(t, script(user, attackScript, strings.NewReader(string(input))))), &got); err != nil {
		t.Fatal(err)
	}
	t.Logf("sent %v, refused %v", got.Sent, got.Refused)
	if len(got.Got) != 0 {
		t.Errorf("something came of it: %q", got.Got)
	}
	for _, kind := range kinds {
		if got.Sent[kind] < min(len(a.V4), len(a.V6))/2 {
			t.Errorf("%d packets of %s were sent, which proves nothing", got.Sent[kind], kind)
		}
	}
	if user == "worker" && got.Refused["AF_PACKET EPERM"] == 0 {
		t.Error("the worker may send raw frames")
	}
	var sent int64
	for kind, n := range got.Sent {
		if !strings.Contains(kind, " own ") && !strings.Contains(kind, " unresolved ") { // those stay in the machine
			sent += int64(n)
		}
	}
	eventually(t, func() error {
		if counted := m.packets(t) - before; counted < sent {
			return fmt.Errorf("%d packets were counted, %d were sent", counted, sent)
		}
		return nil
	})
	t.Logf("%d packets sent, %d counted", sent, m.packets(t)-before)
}

// peerEars is ears.py at work in a machine.
type peerEars struct {
	input *io.PipeWriter
	lines *bufio.Reader
	ended chan error
}

// hearing is what it tells.
type hearing struct {
	Marked  int `json:"marked"`  // frames with the mark
	Foreign int `json:"foreign"` // frames that came in through the card
	TCP     int `json:"tcp"`
	UDP     int `json:"udp"`
}

func listenInMachine(t *testing.T, m *machine, mark string, ports []int) *peerEars {
	t.Helper()
	in, input := io.Pipe()
	output, out := io.Pipe()
	p := &peerEars{input: input, lines: bufio.NewReader(output), ended: make(chan error, 1)}
	job, err := json.Marshal(map[string]any{"mark": mark, "ports": ports})
	if err != nil {
		t.Fatal(err)
	}
	ctx := t.Context()
	go func() {
		exit, err := m.guest.Exec(ctx, script("root", earsScript, in), out, out)
		if err == nil && exit.Code != 0 {
			err = fmt.Errorf("exit code %d", exit.Code)
		}
		_ = out.CloseWithError(io.EOF)
		_ = in.CloseWithError(io.ErrClosedPipe)
		p.ended <- err
	}()
	if _, err := input.Write(append(job, '\n')); err != nil {
		t.Fatal(err)
	}
	if got := p.next(t); got != (hearing{}) {
		t.Fatalf("it hears %+v at its start", got)
	}
	return p
}

func (p *peerEars) next(t *testing.T) (got hearing) {
	t.Helper()
	stop := time.AfterFunc(commandLimit, func() { _ = p.input.CloseWithError(io.ErrUnexpectedEOF) })
	defer stop.Stop()
	line, err := p.lines.ReadString('\n')
	if err == nil {
		err = json.Unmarshal([]byte(line), &got)
	}
	if err != nil {
		rest, _ := io.ReadAll(p.lines)
		t.Fatalf("ears in the machine: %v: %s%s", err, line, rest)
	}
	return got
}

// end checks that nothing was heard, and that something would have been.
func (p *peerEars) end(t *testing.T) {
	t.Helper()
	if err := p.input.Close(); err != nil {
		t.Fatal(err)
	}
	if got := p.next(t); got != (hearing{}) {
		t.Errorf("another machine heard %+v", got)
	}
	if got := p.next(t); got.Marked == 0 || got.TCP == 0 || got.UDP == 0 || got.Foreign != 0 {
		t.Errorf("of itself the other machine heard %+v only: the test would hear nothing", got)
	}
	if err := <-p.ended; err != nil {
		t.Error(err)
	}
}

// TestLookupsFailFast: without a resolver a name fails at once, with the words that people know.
func TestLookupsFailFast(t *testing.T) {
	t.Parallel()
	m := commonHost(t).start(t)
	for _, user := range []string{"worker", "root"} {
		best := time.Hour
		for range 3 {
			began := time.Now()
			_, stderr, exit, err := m.exec(t.Context(), guest.Command{
				User: user, Args: []string{"curl", "-sS", "-m", "8", "https://example.com"}})
			best = min(best, time.Since(began))
			if err != nil {
				t.Fatal(err)
			}
			if want := "curl: (6) Could not resolve host: example.com\n"; exit.Code != 6 || stderr != want {
				t.Errorf("as %s: exit code %d, %q, want %q", user, exit.Code, stderr, want)
			}
		}
		if best > 4*time.Second {
			t.Errorf("as %s it took %v", user, best)
		}
		t.Logf("as %s it took %v", user, best)
	}
	for _, url := range []string{"http://169.254.169.254/latest/meta-data/", "http://[fd00:ec2::254]/", "http://8.8.8.8/"} {
		out, _, exit, err := m.exec(t.Context(), guest.Command{Args: []string{"curl", "-sS", "-m", "8", url}})
		if err != nil || exit.Code != 7 && exit.Code != 28 || out != "" { // cannot connect, time passed
			t.Errorf("%s: exit code %d, %q, %v", url, exit.Code, out, err)
		}
	}
}
