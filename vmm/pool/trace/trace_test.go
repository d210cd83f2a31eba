package trace

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/ephemeral-run/ephemeral/vmm/pool/workload"
)

func TestRead(t *testing.T) {
	second := time.Second
	want := []workload.Arrival{{At: 0, Service: 2 * second}, {At: second / 4, Service: second / 2}, {At: second / 4}}
	for name, text := range map[string]string{
		"seconds":      "arrived,service_seconds\n100,2\n100.25,0.5\n100.25,0\n",
		"times":        "arrived,service_seconds\n2026-10-07T09:00:00Z,2\n2026-10-07T11:00:00.25+02:00,0.5\n2026-10-07T09:00:00.25Z,0\n",
		"more columns": "# recorded\nid,service_seconds,arrived\na,2,5\nb,500ms,5.25\n\"c,d\",0,5.25\n",
	} {
		got, err := Read(strings.NewReader(text))
		if err != nil || !got.Service {
			t.Errorf("%s: %v", name, err)
		}
		if diff := cmp.Diff(want, got.Arrivals); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
	}
	got, err := Read(strings.NewReader("arrived\n1\n"))
	if err != nil || got.Service || len(got.Arrivals) != 1 {
		t.Errorf("without service times: %+v, %v", got, err)
	}
}

func TestRefused(t *testing.T) {
	for text, want := range map[string]string{
		"":                                   "header",
		"time\n1\n":                          `column "arrived"`,
		"arrived\n":                          "without arrivals",
		"arrived\n2\n1\n":                    "line 3 of a trace: arrived: \"1\" is before",
		"arrived\nsoon\n":                    "line 2",
		"arrived\nNaN\n":                     "neither",
		"arrived\n1\n2026-10-07T09:00:00Z\n": "times and seconds",
		"arrived\n1\n1e11\n":                 "spans more",
		"arrived,service_seconds\n1\n":       "wrong number of fields",
		"arrived,service_seconds\n1,-1\n":    "line 2 of a trace: service_seconds",
		"arrived\n\"1\n":                     "read a trace",
	} {
		if got, err := Read(strings.NewReader(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %+v, %v, want an error with %q", text, got, err, want)
		}
	}
}

// FuzzRead holds what was read to the promises of a trace, and to being written and read again.
func FuzzRead(f *testing.F) {
	f.Add("arrived,service_seconds\n2026-10-07T09:00:00Z,2\n2026-10-07T09:00:00.25Z,0.5\n")
	f.Add("arrived\n-5\n1e3\n")
	f.Add("# x\narrived,arrived\n1,2\n")
	f.Fuzz(func(t *testing.T, text string) {
		got, err := Read(strings.NewReader(text))
		if err != nil {
			return
		}
		var last time.Duration
		for _, a := range got.Arrivals {
			if a.At < last || a.Service < 0 {
				t.Fatalf("arrival %+v after %s", a, last)
			}
			last = a.At
		}
		var out bytes.Buffer
		if err := Write(&out, got); err != nil {
			t.Fatal(err)
		}
		again, err := Read(&out)
		if err != nil || len(again.Arrivals) != len(got.Arrivals) {
			t.Fatalf("written and read again: %d of %d arrivals, %v", len(again.Arrivals), len(got.Arrivals), err)
		}
	})
}
