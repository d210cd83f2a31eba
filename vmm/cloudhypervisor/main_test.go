package cloudhypervisor_test

import (
	"os"
	"testing"

	"github.com/ephemeral-run/ephemeral/vmm/cloudhypervisor/chfake"
)

func TestMain(m *testing.M) {
	chfake.Main()
	os.Exit(m.Run())
}
