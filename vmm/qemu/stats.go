package qemu

import "github.com/ephemeral-run/ephemeral/vmm"

// Stats reads memory and CPU time of the QEMU process from /proc.
func (m *machine) Stats() (vmm.Stats, error) {
	select {
	case <-m.process.Done(): // its pid may be another's by now
		return vmm.Stats{}, m.wrap("stats of", vmm.ErrClosed)
	default:
	}
	s, err := vmm.ProcessStats(m.process.Pid())
	return s, m.wrap("stats of", err)
}
