package cloudhypervisor

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
)

// Bounds of the event stream. A guest can cause events (by resetting devices), so they are counted over the whole life.
const (
	maxEvent  = 64 << 10
	maxEvents = 100_000
)

// event is one of the event monitor.
type event struct {
	Source string `json:"source"` // vmm, vm, guest, virtio-device
	Event  string `json:"event"`
}

func (e event) String() string { return fmt.Sprintf("%.32s %.32s", e.Source, e.Event) }

// readEvents passes on all events until the stream ends, which is no error. An event that was cut, as when the pipe was full,
// is one: what was lost could have been the guest's reset.
func readEvents(r io.Reader, handle func(event)) error {
	bounded := &io.LimitedReader{R: r}
	decoder := json.NewDecoder(bounded)
	for range maxEvents {
		bounded.N = maxEvent
		var e event
		err := decoder.Decode(&e)
		switch {
		case errors.Is(err, io.EOF) && bounded.N > 0:
			return nil
		case err != nil && bounded.N <= 0:
			return fmt.Errorf("an event of more than %d bytes", maxEvent)
		case err != nil:
			return fmt.Errorf("read event: %w", err)
		}
		handle(e)
	}
	return fmt.Errorf("more than %d events", maxEvents)
}
