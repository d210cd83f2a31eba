package cloudhypervisor_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/ephemeral-run/ephemeral/vmm"
	"github.com/ephemeral-run/ephemeral/vmm/cloudhypervisor"
	"github.com/ephemeral-run/ephemeral/vmm/cloudhypervisor/chfake"
	"github.com/ephemeral-run/ephemeral/vmm/vmmtest"
)

// refusals are answers of upstream to a restore, in its words, and what of them is the template's fault.
var refusals = map[string]struct {
	status   int
	causes   []string
	template bool
}{
	"another CPU":         {500, []string{"Migration service error", "CPUID compatibility check failed on VM restore"}, true},
	"other registers":     {500, []string{"Failed to restore CPU state", "Failed to set MSR registers"}, true},
	"state of a stranger": {500, []string{"Error deserializing state", "cannot deserialize the state"}, true},
	"socket in the way": {500, []string{"Error from device manager", "Cannot create virtio-vsock backend",
		"Error binding to the host-side Unix socket", "Address already in use (os error 98)"}, false},
	"tap refused":          {500, []string{"Error from device manager", "Cannot open tap", "Operation not permitted (os error 1)"}, false},
	"tap gone":             {500, []string{"Error from device manager", "Cannot open tap", "No such device (os error 19)"}, false},
	"descriptors missing":  {500, []string{"Net id net is associated with FDs and is required"}, false},
	"disk missing":         {500, []string{"Error from device manager", "Cannot open disk path", "No such file or directory (os error 2)"}, false},
	"disk locked":          {500, []string{"Error locking disk images: Another instance likely holds a lock"}, false},
	"memory too short":     {500, []string{"Memory manager error", "The memory region's mapping is past the end of the file (MappingPastEof)"}, false},
	"no memory":            {500, []string{"Memory manager error", "Cannot allocate memory (os error 12)"}, false},
	"landlock":             {500, []string{"Error applying landlock", "Permission denied (os error 13)"}, false},
	"already there":        {500, []string{"VM is already created"}, false},
	"still filling":        {500, []string{"VM on-demand memory restore is still in progress"}, false},
	"migrating":            {500, []string{"VM is currently migrating and can't be modified"}, false},
	"not created":          {404, []string{"VM is not created"}, false},
	"removal is under way": {429, []string{"VcpuPendingRemovedVcpu"}, false},
	"bad request":          {400, []string{"Failed to deserialize JSON", "missing field `source_url`"}, false},
	"busy":                 {503, nil, false},
}

// TestUpstreamErrors: whatever a restore is refused with, the error names call, status, state and causes, is the template's
// fault or not, and nothing is left.
func TestUpstreamErrors(t *testing.T) {
	h := fakeHarness(t, chfake.Options{})
	tpl := h.MakeTemplate(t, t.TempDir())
	for name, c := range refusals {
		t.Run(name, func(t *testing.T) {
			vmmtest.LeavesNothing(t)
			h := h
			h.Driver = fakeDriver(t, chfake.Options{Faults: []chfake.Fault{
				{Call: "vm.restore", Kind: chfake.Refuse, Status: c.status, Causes: append([]string{"Error from API", "The VM could not be restored"}, c.causes...)},
			}})
			ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
			defer cancel()
			_, err := h.TimeClone(ctx, t, tpl)
			if errors.Is(err, vmm.ErrTemplate) != c.template {
				t.Errorf("the template's fault: %t, want %t: %v", !c.template, c.template, err)
			}
			var refused *cloudhypervisor.APIError
			if !errors.As(err, &refused) || refused.Status != c.status || refused.Call != "vm.restore" {
				t.Fatalf("no APIError of the call: %v", err)
			}
			for _, text := range append(c.causes, "vm.restore", fmt.Sprint(c.status)) {
				if !strings.Contains(err.Error(), text) {
					t.Errorf("it does not say %q: %v", text, err)
				}
			}
		})
	}
}
