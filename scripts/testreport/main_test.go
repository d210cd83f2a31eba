package main

import (
	"strings"
	"testing"
)

func TestReport(t *testing.T) {
	tests := []struct {
		name   string
		events []string
		ok     bool
		want   string   // last line
		shows  []string // in the output
		hides  []string
	}{
		{
			"pass, subtests and skip",
			[]string{
				`{"Action":"start","Package":"p"}`,
				`{"Action":"run","Package":"p","Test":"TestA"}`,
				`{"Action":"output","Package":"p","Test":"TestA","Output":"chatter\n"}`,
				`{"Action":"pass","Package":"p","Test":"TestA"}`,
				`{"Action":"run","Package":"p","Test":"TestB"}`,
				`{"Action":"run","Package":"p","Test":"TestB/x"}`,
				`{"Action":"run","Package":"p","Test":"TestB/x/y"}`,
				`{"Action":"pass","Package":"p","Test":"TestB/x/y"}`,
				`{"Action":"pass","Package":"p","Test":"TestB/x"}`,
				`{"Action":"run","Package":"p","Test":"TestB/z"}`,
				`{"Action":"output","Package":"p","Test":"TestB/z","Output":"    b_test.go:7: no such device\n"}`,
				`{"Action":"skip","Package":"p","Test":"TestB/z"}`,
				`{"Action":"pass","Package":"p","Test":"TestB"}`,
				`{"Action":"pass","Package":"p","Elapsed":1.25}`,
			},
			true, "2 passed, 0 failed, 1 skipped",
			[]string{"ok    p  1.2s  2 passed", "skip  p TestB/z: no such device"}, []string{"chatter", "FAIL"},
		},
		{
			"a subtest fails",
			[]string{
				`{"Action":"run","Package":"p","Test":"TestA"}`,
				`{"Action":"run","Package":"p","Test":"TestA/x"}`,
				`{"Action":"output","Package":"p","Test":"TestA/x","Output":"want 1\n"}`,
				`{"Action":"fail","Package":"p","Test":"TestA/x"}`,
				`{"Action":"run","Package":"p","Test":"TestA/y"}`,
				`{"Action":"pass","Package":"p","Test":"TestA/y"}`,
				`{"Action":"fail","Package":"p","Test":"TestA"}`,
				`{"Action":"fail","Package":"p","Elapsed":0.1}`,
			},
			false, "1 passed, 1 failed, 0 skipped", []string{"FAIL  p TestA/x", "      want 1"}, nil,
		},
		{
			"a slash that separates nothing",
			[]string{
				`{"Action":"run","Package":"p","Test":"TestA"}`,
				`{"Action":"run","Package":"p","Test":"TestA/HTTP/1.0"}`,
				`{"Action":"pass","Package":"p","Test":"TestA/HTTP/1.0"}`,
				`{"Action":"run","Package":"p","Test":"TestA/HTTP/2.0"}`,
				`{"Action":"fail","Package":"p","Test":"TestA/HTTP/2.0"}`,
				`{"Action":"fail","Package":"p","Test":"TestA"}`,
				`{"Action":"fail","Package":"p","Elapsed":0.1}`,
			},
			false, "1 passed, 1 failed, 0 skipped", []string{"FAIL  p TestA/HTTP/2.0"}, nil,
		},
		{
			"a parent fails by itself",
			[]string{
				`{"Action":"run","Package":"p","Test":"TestA"}`,
				`{"Action":"run","Package":"p","Test":"TestA/x"}`,
				`{"Action":"pass","Package":"p","Test":"TestA/x"}`,
				`{"Action":"output","Package":"p","Test":"TestA","Output":"leaked\n"}`,
				`{"Action":"fail","Package":"p","Test":"TestA"}`,
				`{"Action":"fail","Package":"p"}`,
			},
			false, "1 passed, 1 failed, 0 skipped", []string{"      leaked"}, nil,
		},
		{
			"does not build",
			[]string{
				`{"Action":"build-output","ImportPath":"q [q.test]","Output":"./q.go:1:1: syntax error\n"}`,
				`{"Action":"build-fail","ImportPath":"q [q.test]"}`,
				`{"Action":"output","Package":"q","Output":"FAIL\tq [build failed]\n"}`,
				`{"Action":"fail","Package":"q","FailedBuild":"q [q.test]"}`,
				`{"Action":"run","Package":"p","Test":"TestA"}`,
				`{"Action":"pass","Package":"p","Test":"TestA"}`,
				`{"Action":"pass","Package":"p"}`,
			},
			false, "1 passed, 1 failed, 0 skipped", []string{"syntax error", "[build failed]"}, nil,
		},
		{
			"a test never ends",
			[]string{
				`{"Action":"run","Package":"p","Test":"TestA"}`,
				`{"Action":"pass","Package":"p","Test":"TestA"}`,
				`{"Action":"run","Package":"p","Test":"TestB"}`,
				`{"Action":"output","Package":"p","Output":"panic: test timed out\n"}`,
				`{"Action":"fail","Package":"p"}`,
			},
			false, "1 passed, 1 failed, 0 skipped", []string{"FAIL  p TestB"}, nil,
		},
		{
			"a package never ends",
			[]string{`{"Action":"run","Package":"p","Test":"TestA"}`, `{"Action":"pass","Package":"p","Test":"TestA"}`},
			false, "0 passed, 1 failed, 0 skipped", []string{"did not end"}, nil,
		},
		{
			"no tests", []string{`{"Action":"skip","Package":"p"}`},
			false, "0 passed, 0 failed, 0 skipped", []string{"none  p"}, nil,
		},
		{
			"not JSON", []string{"go: go.mod file not found"},
			false, "0 passed, 0 failed, 0 skipped", []string{"go: go.mod file not found"}, nil,
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var b strings.Builder
			ok, err := report(strings.NewReader(strings.Join(tt.events, "\n")+"\n"), &b, false)
			out := b.String()
			if (ok && err == nil) != tt.ok {
				t.Errorf("ok %t, %v, want %t", ok, err, tt.ok)
			}
			lines := strings.Split(strings.TrimSpace(out), "\n")
			if lines[len(lines)-1] != tt.want {
				t.Errorf("last line %q, want %q", lines[len(lines)-1], tt.want)
			}
			for _, s := range tt.shows {
				if !strings.Contains(out, s) {
					t.Errorf("no %q in\n%s", s, out)
				}
			}
			for _, s := range tt.hides {
				if strings.Contains(out, s) {
					t.Errorf("%q in\n%s", s, out)
				}
			}
		})
	}
}

func TestOutputIsBounded(t *testing.T) {
	var in strings.Builder
	line := `{"Action":"output","Package":"p","Test":"TestA","Output":"` + strings.Repeat("x", 1000) + `\n"}` + "\n"
	for range 1000 {
		in.WriteString(line)
	}
	in.WriteString(`{"Action":"fail","Package":"p","Test":"TestA"}` + "\n" + `{"Action":"fail","Package":"p"}` + "\n")
	var out strings.Builder
	if ok, _ := report(strings.NewReader(in.String()), &out, false); ok {
		t.Error("passed")
	}
	if out.Len() > 2*keepOutput {
		t.Errorf("%d bytes shown", out.Len())
	}
}

// TestLogged: with -log, the lines that tests log are shown also when they pass, and no others.
func TestLogged(t *testing.T) {
	in := `{"Action":"run","Package":"p","Test":"T"}
{"Action":"output","Package":"p","Test":"T","Output":"=== RUN   T\n"}
{"Action":"output","Package":"p","Test":"T","Output":"    kills_test.go:12: kill 1, redis\n"}
{"Action":"pass","Package":"p","Test":"T"}
{"Action":"pass","Package":"p"}
`
	for log, want := range map[bool]string{
		true:  "      kills_test.go:12: kill 1, redis\nok    p  0.0s  1 passed, 0 failed, 0 skipped\n1 passed, 0 failed, 0 skipped\n",
		false: "ok    p  0.0s  1 passed, 0 failed, 0 skipped\n1 passed, 0 failed, 0 skipped\n",
	} {
		var out strings.Builder
		if ok, err := report(strings.NewReader(in), &out, log); !ok || err != nil || out.String() != want {
			t.Errorf("-log=%t: %t, %v\n%s", log, ok, err, out.String())
		}
	}
}
