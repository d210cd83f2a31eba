package kvmbox

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestTally(t *testing.T) {
	for name, c := range map[string]struct {
		events string
		want   Count
	}{
		"subtests are counted in place of their parent": {`
{"Action":"start"}
{"Action":"run","Test":"TestA"}
{"Action":"run","Test":"TestA/one"}
{"Action":"pass","Test":"TestA/one","Elapsed":1.5}
{"Action":"run","Test":"TestA/two"}
{"Action":"pass","Test":"TestA/two"}
{"Action":"pass","Test":"TestA"}
{"Action":"pass"}`, Count{Passed: 2}},
		"a failed subtest is not counted again": {`
{"Action":"run","Test":"TestA"}
{"Action":"run","Test":"TestA/one"}
{"Action":"output","Test":"TestA/one","Output":"=== RUN   TestA/one\n"}
{"Action":"output","Test":"TestA/one","Output":"    a_test.go:7: broken\n"}
{"Action":"fail","Test":"TestA/one"}
{"Action":"run","Test":"TestA/two"}
{"Action":"pass","Test":"TestA/two"}
{"Action":"fail","Test":"TestA"}
{"Action":"fail"}`, Count{Passed: 1, Failed: 1, Reasons: []string{"TestA/one: a_test.go:7: broken"}}},
		"a parent may fail by itself": {`
{"Action":"run","Test":"TestA"}
{"Action":"run","Test":"TestA/one"}
{"Action":"pass","Test":"TestA/one"}
{"Action":"output","Test":"TestA","Output":"    a_test.go:9: left behind\n"}
{"Action":"fail","Test":"TestA"}
{"Action":"fail"}`, Count{Passed: 1, Failed: 1, Reasons: []string{"TestA: a_test.go:9: left behind"}}},
		"skipped": {`
{"Action":"run","Test":"TestA"}
{"Action":"output","Test":"TestA","Output":"    a_test.go:3: no program\n"}
{"Action":"skip","Test":"TestA"}
{"Action":"pass"}`, Count{LeftOut: 1, Reasons: []string{"TestA: a_test.go:3: no program"}}},
		"what did not end has failed": {`
{"Action":"run","Test":"TestA"}
{"Action":"run","Test":"TestA/one"}`, Count{Failed: 1, Reasons: []string{"TestA/one: did not end"}}},
		"the program died": {`
{"Action":"output","Output":"panic: oh\n"}
{"Action":"fail"}`, Count{Failed: 1, Reasons: []string{"the tests' program: panic: oh"}}},
	} {
		t.Run(name, func(t *testing.T) {
			if c.want.Reasons == nil {
				c.want.Reasons = []string{}
			}
			got, err := tally(strings.NewReader(strings.TrimSpace(c.events)), t.Output())
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestTallyRefusesOtherInput(t *testing.T) {
	if _, err := tally(strings.NewReader("PASS\n"), t.Output()); err == nil {
		t.Error("no error")
	}
}
