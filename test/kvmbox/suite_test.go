package kvmbox

import (
	"bytes"
	"encoding/json"
	"os"
	"strings"
	"testing"
)

const goodRun = `{"state":"succeeded","isolation":"kvm",
"money":{"reserved_micros":40000,"charged_micros":1730,"released_micros":38270},
"result":{"output":"1. 2 3 5 7 11 13 17 19 23 29 31 37 41 43 47\n2. whoami: worker; pwd: /tmp/x\n3. curl: (6) Could not resolve host: example.com\n4. /tmp/proof.txt"}}`

func TestCheckRun(t *testing.T) {
	if err := checkRun([]byte(goodRun)); err != nil {
		t.Error(err)
	}
	for old, want := range map[string]string{
		"succeeded":      "the run",
		`"kvm"`:          "isolation",
		"38270":          "money",
		"whoami: worker": "whoami",
		"curl: (6)":      "curl",
		"{":              "the finished run",
	} {
		bad := strings.Replace(goodRun, old, `"other"`, 1)
		if old != `"kvm"` && old != "{" {
			bad = strings.Replace(goodRun, old, "1", 1)
		}
		if err := checkRun([]byte(bad)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("without %s: %v", old, err)
		}
	}
}

func TestRecord(t *testing.T) {
	left := Count{}
	left.leaveOut("no program: none is there")
	r := Record{Place: "here", Drivers: map[string]Count{"qemu": {Passed: 3, Rounds: 1}, "cloud-hypervisor": left}, Run: json.RawMessage(goodRun)}
	if !r.Passed() {
		t.Error("what is left out counts as failed")
	}
	var out bytes.Buffer
	r.Summarise(&out)
	want := `cloud-hypervisor: 0 passed, 0 failed, 1 left out, in 0 rounds
  no program: none is there
qemu: 3 passed, 0 failed, 0 left out, in 1 rounds
recorded run: succeeded, isolation kvm
`
	if out.String() != want {
		t.Errorf("summary:\n%s\nwant:\n%s", out.String(), want)
	}
	r.RunError = "the run failed"
	if r.Passed() {
		t.Error("passed although the run failed")
	}
	r.RunError, r.Drivers["qemu"] = "", Count{Passed: 3, Failed: 1}
	if r.Passed() {
		t.Error("passed although a test failed")
	}
}

// TestCount counts tests of this very program, on this host.
func TestCount(t *testing.T) {
	program, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	s := &Suite{Root: checkout(t), Out: t.Output()}
	count, code, err := s.count(t.Context(), &host{}, Command{Args: []string{program, "-test.v=test2json", "-test.run", "^(TestRecord|TestCheckRun)$"}})
	if err != nil || code != 0 || count.Passed != 2 || count.Failed != 0 {
		t.Errorf("%+v, code %d, %v", count, code, err)
	}
	count, code, err = s.count(t.Context(), &host{}, Command{Args: []string{"sh", "-c", "echo '=== RUN   TestA'; echo 'panic: oh'; exit 2"}})
	if err != nil || code != 2 || count.Failed != 1 {
		t.Errorf("one that dies: %+v, code %d, %v", count, code, err)
	}
	if _, _, err := s.count(t.Context(), &host{}, Command{Args: []string{"/missing"}}); err == nil {
		t.Error("a missing program is counted")
	}
}
