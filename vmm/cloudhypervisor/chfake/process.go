package chfake

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// run is the whole life of a fake. It returns only failures: else the process ends inside.
func run(options string, args []string) error {
	content, err := os.ReadFile(host(options))
	if err != nil {
		return err
	}
	v := &vmm{}
	if err := json.Unmarshal(content, &v.options); err != nil {
		return err
	}
	api, events, err := parse(args)
	if err != nil {
		return err
	}
	v.events = events
	syscall.Umask(0o077)
	v.emit("vmm", "starting")
	if v.options.NoAPI {
		select {}
	}
	l, err := net.FileListener(api)
	if err != nil {
		return fmt.Errorf("API socket: %w", err)
	}
	if err := v.openGuests(); err != nil {
		return err
	}
	return v.serve(l.(*net.UnixListener))
}

// parse takes the inherited descriptors out of the command line, and refuses what it does not know.
func parse(args []string) (api, events *os.File, err error) {
	for i := 0; i+1 < len(args); i += 2 {
		name, value := args[i], args[i+1]
		switch name {
		case "--api-socket":
			api, err = inherited(value)
		case "--event-monitor":
			events, err = inherited(value)
		case "--seccomp":
			if value != "true" {
				err = fmt.Errorf("--seccomp %q", value)
			}
		default:
			err = fmt.Errorf("unexpected argument %q", name)
		}
		if err != nil {
			return nil, nil, err
		}
	}
	if api == nil || events == nil || len(args)%2 != 0 {
		return nil, nil, errors.New("API socket or event monitor is missing")
	}
	return api, events, nil
}

func inherited(value string) (*os.File, error) {
	number, ok := strings.CutPrefix(value, "fd=")
	fd, err := strconv.Atoi(number)
	if !ok || err != nil {
		return nil, fmt.Errorf("%q is no descriptor", value)
	}
	syscall.CloseOnExec(fd)
	return os.NewFile(uintptr(fd), value), nil
}

// emit writes an event as the real one does: pretty-printed, followed by an empty line.
func (v *vmm) emit(source, event string) {
	b, err := json.MarshalIndent(map[string]any{
		"timestamp": map[string]int64{"secs": time.Now().Unix(), "nanos": 0}, "source": source, "event": event, "properties": nil,
	}, "", "  ")
	if err != nil {
		panic("an event is plain data: " + err.Error())
	}
	_, _ = v.events.Write(append(b, '\n', '\n'))
}
