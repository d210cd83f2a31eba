package cloudhypervisor

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"net"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/ephemeral-run/ephemeral/images"
	"github.com/ephemeral-run/ephemeral/vmm"
)

func TestVersion(t *testing.T) {
	for printed, want := range map[string]struct {
		text      string
		warns, ok bool
	}{
		"cloud-hypervisor v53.0\n":                         {"53.0", false, true},
		"cloud-hypervisor v53.0-dirty\nMigration: 0":       {"53.0-dirty", false, true},
		"cloud-hypervisor v53.0.0-12-g0123abc":             {"53.0.0-12-g0123abc", false, true},
		"cloud-hypervisor v52.0":                           {"52.0", true, true},
		"cloud-hypervisor v51.2":                           {"", false, false},
		"cloud-hypervisor v54.0":                           {"", false, false},
		"cloud-hypervisor 53.0":                            {"", false, false},
		"QEMU emulator version 7.2":                        {"", false, false},
		"":                                                 {"", false, false},
		"cloud-hypervisor v5" + strings.Repeat("3", 10000): {"", false, false},
	} {
		text, warning, err := version(printed)
		if text != want.text || (warning != "") != want.warns || (err == nil) != want.ok {
			t.Errorf("%.40q: %q, %q, %v", printed, text, warning, err)
		}
	}
}

func TestReadEvents(t *testing.T) {
	one := func(source, event string) string {
		return "{\n  \"timestamp\": {\n    \"secs\": 1,\n    \"nanos\": 2\n  },\n  \"source\": \"" + source + "\",\n  \"event\": \"" + event + "\",\n  \"properties\": {\"id\": \"x\"}\n}\n\n"
	}
	many := strings.Repeat(one("vm", "paused"), maxEvents+1)
	for name, c := range map[string]struct {
		stream string
		want   []string
		fails  bool
	}{
		"none":            {"", nil, false},
		"two":             {one("vmm", "starting") + one("guest", "panic"), []string{"vmm starting", "guest panic"}, false},
		"cut":             {one("vmm", "starting") + one("vm", "rebooting")[:20], []string{"vmm starting"}, true},
		"cut and resumed": {one("vm", "x")[:20] + one("vm", "rebooting"), nil, true},
		"no JSON":         {"hello", nil, true},
		"another type":    {"[1]", nil, true},
		"endless":         {`{"source":"` + strings.Repeat("a", 2*maxEvent), nil, true},
		"too many":        {many, nil, true},
	} {
		t.Run(name, func(t *testing.T) {
			var got []string
			err := readEvents(strings.NewReader(c.stream), func(e event) { got = append(got, e.String()) })
			if (err != nil) != c.fails {
				t.Errorf("error: %v", err)
			}
			if c.want != nil && !slices.Equal(got, c.want) {
				t.Errorf("%q", got)
			}
		})
	}
}

func FuzzEvents(f *testing.F) {
	f.Add([]byte("{\"source\":\"vm\",\"event\":\"paused\"}\n\n{\"source\":\"guest\",\"event\":\"panic\"}\n\n"))
	f.Add([]byte("{\"source\":\"vm\",\"event\":"))
	f.Fuzz(func(t *testing.T, stream []byte) {
		n := 0
		_ = readEvents(bytes.NewReader(stream), func(e event) {
			if n++; len(e.String()) > 300 {
				t.Errorf("an event of %d bytes", len(e.String()))
			}
		})
		if n > len(stream) {
			t.Errorf("%d events of %d bytes", n, len(stream))
		}
	})
}

// answering is a peer that says what it has to and keeps what it is told.
type answering struct {
	io.Reader
	bytes.Buffer
}

func (a *answering) Read(p []byte) (int, error)  { return a.Reader.Read(p) }
func (a *answering) Write(p []byte) (int, error) { return a.Buffer.Write(p) }

func TestHandshake(t *testing.T) {
	for answer, want := range map[string]struct{ ok, refused bool }{
		"OK 1073741824\n":                  {ok: true},
		"OK 1073741824\nhello":             {ok: true},
		"":                                 {refused: true},
		"OK 10737":                         {refused: true},
		"OK\n":                             {},
		"OK x\n":                           {},
		"OK -1\n":                          {},
		"OK 4294967296\n":                  {},
		"NO 1\n":                           {},
		"OK 1" + strings.Repeat("0", 100):  {},
		strings.Repeat("\x00", 100) + "\n": {},
	} {
		a := &answering{Reader: strings.NewReader(answer)}
		err := handshake(a, 1024)
		if (err == nil) != want.ok || errors.Is(err, errRefused) != want.refused {
			t.Errorf("%.40q: %v", answer, err)
		}
		if got := a.Buffer.String(); got != "CONNECT 1024\n" {
			t.Errorf("it asks %q", got)
		}
		if rest, _ := io.ReadAll(a.Reader); strings.HasSuffix(answer, "hello") && string(rest) != "hello" {
			t.Errorf("%q is left of what the guest sent", rest)
		}
	}
}

func FuzzHandshake(f *testing.F) {
	f.Add([]byte("OK 1073741824\nrest"))
	f.Add([]byte("OK"))
	f.Fuzz(func(t *testing.T, answer []byte) {
		from := bytes.NewReader(answer)
		err := handshake(&answering{Reader: from}, 1)
		read := len(answer) - from.Len()
		if read > maxAnswer+1 {
			t.Errorf("it reads %d bytes", read)
		}
		if err == nil && (!bytes.HasPrefix(answer, []byte("OK ")) || answer[read-1] != '\n') {
			t.Errorf("%q is taken for a yes", answer)
		}
	})
}

func TestReceive(t *testing.T) {
	for name, c := range map[string]struct {
		answer  string
		status  int
		content string
		last    bool
		fails   bool
	}{
		"no content":     {"HTTP/1.1 204 \r\nServer: x\r\n\r\n", 204, "", false, false},
		"content":        {"HTTP/1.1 200 \r\nContent-Length: 2\r\n\r\n{}", 200, "{}", false, false},
		"empty":          {"HTTP/1.1 200 \r\nContent-Length: 0\r\n\r\n", 200, "", false, false},
		"two":            {"HTTP/1.1 200 \r\nContent-Length: 2\r\n\r\n{}HTTP/1.1 204 \r\n\r\n", 200, "{}", true, false},
		"close":          {"HTTP/1.1 503 \r\nConnection: close\r\nContent-Length: 0\r\n\r\n", 503, "", true, false},
		"cut":            {"HTTP/1.1 200 \r\nContent-Length: 5\r\n\r\n{}", 0, "", true, true},
		"unknown length": {"HTTP/1.1 200 \r\n\r\n{}", 0, "", true, true},
		"too long":       {"HTTP/1.1 200 \r\nContent-Length: 5000000\r\n\r\n" + strings.Repeat("x", 5000000), 0, "", true, true},
		"endless header": {"HTTP/1.1 200 \r\nX: " + strings.Repeat("x", 10_000_000), 0, "", true, true},
		"no HTTP":        {"hello", 0, "", true, true},
		"nothing":        {"", 0, "", true, true},
	} {
		t.Run(name, func(t *testing.T) {
			status, content, last, err := receive(strings.NewReader(c.answer))
			if status != c.status || string(content) != c.content || last != c.last || (err != nil) != c.fails {
				t.Errorf("%d, %.40q, %t, %v", status, content, last, err)
			}
		})
	}
}

func FuzzReceive(f *testing.F) {
	f.Add([]byte("HTTP/1.1 500 \r\nContent-Length: 20\r\n\r\n[\"Error from API\",\"\"]"))
	f.Add([]byte("HTTP/1.1 204 \r\n\r\n"))
	f.Fuzz(func(t *testing.T, answer []byte) {
		_, content, _, err := receive(bytes.NewReader(answer))
		if err != nil {
			return
		}
		e := &APIError{Call: "vm.info", Status: 500, Causes: causes(content)}
		if n := len(e.Error()); n > maxCauses*(maxCause+2)*3+100 {
			t.Errorf("an error of %d bytes", n)
		}
	})
}

func TestCauses(t *testing.T) {
	for content, want := range map[string][]string{
		`["Error from API","The VM could not boot"]`: {"Error from API", "The VM could not boot"},
		`{ "error": "Invalid header" }`:              {"Invalid header"},
		"plain":                                      {"plain"},
		"":                                           {""},
		"[1]":                                        {"[1]"},
	} {
		if got := causes([]byte(content)); !slices.Equal(got, want) {
			t.Errorf("%q: %q", content, got)
		}
	}
	long, err := json.Marshal(slices.Repeat([]string{strings.Repeat("x", 1000)}, 100))
	if err != nil {
		t.Fatal(err)
	}
	if got := causes(long); len(got) != maxCauses || len(got[0]) != maxCause {
		t.Errorf("%d causes of %d bytes", len(got), len(got[0]))
	}
}

func TestEncode(t *testing.T) {
	if _, err := encode("PUT", "vm.create", strings.Repeat("x", maxRequest)); err == nil {
		t.Error("a request beyond the server's limit is sent")
	}
	got, err := encode("PUT", "vm.boot", nil)
	if err != nil || strings.Contains(string(got), "Content-Length") {
		t.Errorf("%q, %v: a body where none is allowed", got, err)
	}
}

func TestCloneConfig(t *testing.T) {
	const template = `{"cpus":{"boot_vcpus":1,"max_vcpus":1,"profile":"Host"},
		"memory":{"size":0,"prefault":true,"thp":false,"zones":[{"id":"ram","size":67108864,"file":"/old/ram","shared":true,"reserve":false}]},
		"payload":{"kernel":"/old/k","initramfs":"/old/i","cmdline":"quiet"},
		"disks":[{"id":"root","path":"/old/r","readonly":true,"lock_granularity":"ByteRange"}],
		"net":[{"id":"net","tap":"old","host_mac":"02:00:00:00:00:09","mac":"02:00:00:00:00:01","fds":[-1],"queue_size":256}],
		"balloon":{"size":1},"vsock":{"id":"vsock","cid":3,"socket":"/old/v"},"serial":{"mode":"File","file":"/old/c"},
		"landlock_enable":false,"landlock_rules":[{"path":"/old","access":"rw"}],"unknown":{"a":[1,2.5]}}`
	s := vmm.Spec{
		Dir: "/new", Image: images.Image{Kernel: "/new/k", Initramfs: "/new/i", RootFS: "/new/r"},
		NIC: &vmm.NIC{Tap: "new", MAC: net.HardwareAddr{2, 0, 0, 0, 0, 5}},
	}
	edit := func(template string) string {
		t.Helper()
		got, err := cloneConfig([]byte(template), s, "/new/ram", true)
		if err != nil {
			t.Fatal(err)
		}
		return string(got)
	}
	got := edit(template)
	for _, want := range []string{
		`"file":"/new/ram"`, `"shared":false`, `"kernel":"/new/k"`, `"path":"/new/r"`, `"socket":"./vsock"`, `"file":"./console.log"`, `"tap":"new"`,
		`"landlock_enable":true`, `{"path":"/new","access":"rw"}`, `{"path":"/sys/class/net","access":"r"}`,
		`"unknown":{"a":[1,2.5]}`, `"lock_granularity":"ByteRange"`, `"queue_size":256`, `"profile":"Host"`, `"thp":false`, `"cmdline":"quiet"`, `"mac":"02:00:00:00:00:01"`,
	} {
		if !strings.Contains(got, want) {
			t.Errorf("%s is missing", want)
		}
	}
	for _, lost := range []string{"/old", "prefault", "balloon", "initramfs", "host_mac", `"fds"`} {
		if strings.Contains(got, lost) {
			t.Errorf("%s is left", lost)
		}
	}
	s.NIC.File = os.Stdin
	if got := edit(template); !strings.Contains(got, `"fds":[-1]`) || strings.Contains(got, `"tap"`) || strings.Contains(got, "/sys/class/net") {
		t.Errorf("a card by descriptor: %s", got)
	}
	s.NIC = nil
	if _, err := cloneConfig([]byte(template), s, "/new/ram", true); err == nil {
		t.Error("a card that the clone does not have is taken over")
	}
	for _, bad := range []string{"", "null", "[]", "{}", `{"memory":7}`, strings.Replace(template, `"zones":[`, `"zones":[{"id":"b"},`, 1)} {
		if _, err := cloneConfig([]byte(bad), s, "/new/ram", false); err == nil {
			t.Errorf("%.60q is taken", bad)
		}
	}
}

func FuzzCloneConfig(f *testing.F) {
	f.Add([]byte(`{"memory":{"zones":[{}]},"payload":{},"disks":[{}],"vsock":{}}`))
	s := vmm.Spec{Dir: "/new", Image: images.Image{Kernel: "/k", RootFS: "/r"}}
	f.Fuzz(func(t *testing.T, template []byte) {
		got, err := cloneConfig(template, s, "/ram", false)
		if err == nil && !json.Valid(got) {
			t.Errorf("%q", got)
		}
	})
}

func TestFailed(t *testing.T) {
	for log, want := range map[string]bool{
		"": false,
		"cloud-hypervisor:   0.15s: <vcpu0> WARN:vmm/src/cpu.rs:268 -- Kernel lacks CONFIG_SCHED_CORE": false,
		"cloud-hypervisor:   0.15s: <vcpu0> ERROR:vmm/src/cpu.rs:1 -- VCPU generated error":            true,
		"thread 'vmm' panicked at vmm/src/lib.rs:1":                                                    true,
	} {
		if failed(log) != want {
			t.Errorf("%q: %t", log, !want)
		}
	}
}
