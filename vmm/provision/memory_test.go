package provision

import (
	"errors"
	"strings"
	"testing"
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
