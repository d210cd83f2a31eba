package provision

import (
	"errors"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestAdmission(t *testing.T) {
	for _, tc := range []struct {
		meminfo string
		refused bool
		broken  bool
	}{
		{meminfo: "MemTotal:       24684032 kB\nMemFree:  1 kB\nMemAvailable:   1048576 kB\n"},
		{meminfo: "MemAvailable:   1048575 kB\n", refused: true},
		{meminfo: "MemAvailable:   0 kB\n", refused: true},
		{meminfo: "MemAvailable:   lots kB\n", broken: true},
		{meminfo: "MemFree:   1048576 kB\n", broken: true},
		{meminfo: "", broken: true},
	} {
		err := admit([]byte(tc.meminfo), 512+256)
		if errors.Is(err, ErrMemory) != tc.refused || (err != nil) != (tc.refused || tc.broken) {
			t.Errorf("%q: %v", tc.meminfo, err)
		}
		if tc.refused && !strings.Contains(err.Error(), "a machine needs up to 768") {
			t.Errorf("%q does not say what is needed: %v", tc.meminfo, err)
		}
	}
	p, _ := made(t, newStage())
	if err := p.Admit(); err != nil {
		t.Errorf("this host: %v", err)
	}
	p.config.MemoryMiB = 1 << 30
	if err := p.Admit(); !errors.Is(err, ErrMemory) {
		t.Errorf("a machine of a PiB: %v", err)
	}
}

func TestAdmissionOfDescriptors(t *testing.T) {
	for _, tc := range []struct {
		open      int
		limit     uint64
		exhausted error
		refused   bool
	}{
		{open: 100, limit: 1024},
		{open: 100, limit: 196},
		{open: 100, limit: 195, refused: true},
		{open: 100, limit: 10, refused: true},
		{limit: 1 << 20, exhausted: unix.EMFILE, refused: true},
		{open: 100, limit: unix.RLIM_INFINITY},
	} {
		err := enoughDescriptors(tc.open, tc.limit, tc.exhausted)
		if errors.Is(err, ErrDescriptors) != tc.refused || (err != nil) != tc.refused {
			t.Errorf("%+v: %v", tc, err)
		}
		if tc.refused && !strings.Contains(err.Error(), "LimitNOFILE") {
			t.Errorf("%+v: %v does not say what to do", tc, err)
		}
	}
}
