package provision

import (
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestErrorsSayWhatToDo(t *testing.T) {
	path := func(path string, err error) error { return &fs.PathError{Op: "open", Path: path, Err: err} }
	for _, tc := range []struct {
		err  error
		want string // empty: nothing is known
	}{
		{nil, ""},
		{errors.New("the guest does not answer"), ""},
		{path("/data/x", unix.ENOENT), ""},
		{path("/data/x", unix.ENOSPC), "free space"},
		{fmt.Errorf("make memory file: %w", unix.EDQUOT), "free space"},
		{fmt.Errorf("pipe: %w", unix.EMFILE), "LimitNOFILE"},
		{unix.ENFILE, "fs.file-max"},
		{fmt.Errorf("open /dev/net/tun: %w", unix.ENOENT), "modprobe tun"},
		{fmt.Errorf("open /dev/net/tun: %w", unix.EPERM), "device rules"},
		{path("/sys/fs/cgroup/memory/x", unix.EROFS), "/sys/fs/cgroup writable"},
		{path("/data/x", unix.EROFS), "file system writable"},
		{fmt.Errorf("fork: %w", unix.ENOMEM), "EPHEMERAL_POOL_MAX_MACHINES"},
	} {
		got := advise(tc.err)
		if !errors.Is(got, tc.err) || (tc.err == nil) != (got == nil) {
			t.Errorf("%v became %v", tc.err, got)
		}
		if tc.want == "" && got != tc.err || tc.want != "" && !strings.Contains(got.Error(), tc.want) {
			t.Errorf("%v: advised %v, want %q", tc.err, got, tc.want)
		}
	}
}
