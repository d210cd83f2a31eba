package qemu

import (
	"os"
	"testing"
	"time"
)

func TestProcessStats(t *testing.T) {
	got, err := processStats(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	if got.Pid != os.Getpid() || got.PrivateBytes < 1<<20 || got.CPU < 0 || got.CPU > time.Hour {
		t.Errorf("%+v", got)
	}
}

func TestPrivateBytes(t *testing.T) {
	const rollup = "55d0-7ffe ---p 00000000 00:00 0 [rollup]\nRss: 900 kB\nPrivate_Clean:  12 kB\nPrivate_Dirty: 30 kB\nPrivate_Hugetlb: 99 kB\n"
	if got, err := privateBytes([]byte(rollup)); err != nil || got != 42<<10 {
		t.Errorf("%d, %v", got, err)
	}
	for _, bad := range []string{"", "Private_Clean: 1 kB\n", "Private_Clean: x kB\nPrivate_Dirty: 1 kB\n"} {
		if got, err := privateBytes([]byte(bad)); err == nil {
			t.Errorf("%q gives %d", bad, got)
		}
	}
}

func TestCPUTime(t *testing.T) {
	for stat, want := range map[string]time.Duration{
		"7 (qemu) S 1 7 7 0 -1 4194560 1 0 0 0 150 25 0 0 20 0 3 0":  1750 * time.Millisecond,
		"7 (a) b) (c) S 1 7 7 0 -1 4194560 1 0 0 0 1 2 0 0 20 0 3 0": 30 * time.Millisecond,
		"7 (qemu) S 1 7 7 0 -1 4194560 1 0 0 0 x 25 0 0 20 0 3 0":    -1,
		"7 (qemu) S 1 7 7": -1,
		"":                 -1,
	} {
		got, err := cpuTime(stat)
		if (err != nil) != (want < 0) || err == nil && got != want {
			t.Errorf("%q: %v, %v", stat, got, err)
		}
	}
}

func TestTail(t *testing.T) {
	tl := tail{limit: 5}
	for _, text := range []string{"ab", "cdef", "", "0123456789"} {
		if n, err := tl.Write([]byte(text)); n != len(text) || err != nil {
			t.Errorf("%d, %v", n, err)
		}
	}
	if got := tl.String(); got != "56789" {
		t.Errorf("kept %q", got)
	}
}
