package images

import "fmt"

// leastMemoryMiB is the least memory of a machine, MiB, whatever its image: a kernel of ours, the initramfs and the agent, and
// room to run the interpreters that a template is warmed with. With 104 MiB a machine of base still serves; with 96 it has
// been seen to hang in the warming, with 80 the agent dies at boot, as it does with 64.
const leastMemoryMiB = 104

// mostMemoryMiB is the most that a recipe may ask for.
const mostMemoryMiB = 256 << 10

// CheckMemory refuses machines that are too small for the image to serve: they would not become a template, or not run a
// command. Its error names the smallest size.
func (i Image) CheckMemory(mib int) error {
	if least := max(leastMemoryMiB, i.LeastMemoryMiB); mib < least {
		return fmt.Errorf("%d MiB of memory are too little for machines of image %s: they need at least %d", mib, i.Name, least)
	}
	return nil
}
