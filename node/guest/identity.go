package guest

import (
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"net"
)

// newIdentity makes what tells a machine from its siblings. The address lies in 10.0.0.0/8 and leads nowhere: it is there
// so that what the guest sends leaves it, and is dropped and counted on the host.
func newIdentity(machine string) (Identity, error) {
	var b [24]byte
	if _, err := rand.Read(b[:]); err != nil {
		return Identity{}, fmt.Errorf("make an identity: %w", err)
	}
	mac := net.HardwareAddr(append([]byte{0x02}, b[16:21]...)) // locally administered, unicast: IEEE 802
	address := net.IPv4(10, b[21], b[22], 2+b[23]%250)
	return Identity{
		Hostname:  "ephemeral-" + machine,
		MachineID: hex.EncodeToString(b[:16]),
		MAC:       mac.String(),
		Address:   address.String() + "/32",
	}, nil
}
