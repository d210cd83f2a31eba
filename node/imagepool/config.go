package imagepool

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/ephemeral-run/ephemeral/images"
)

// Wanted is an image that a node serves.
type Wanted struct {
	Image     string
	MemoryMiB int // of a machine; 0: what the node is configured with
}

// maxImages bounds how many images a node serves: each has a template in memory.
const maxImages = 64

// Bounds of a machine's memory, MiB, as of package provision.
const (
	leastMemory = 64
	mostMemory  = 256 << 10
)

// Parse reads the images that a node serves, each as NAME or NAME:MEMORY_MIB. There must be one at least and none twice.
func Parse(list []string) ([]Wanted, error) {
	if len(list) == 0 || len(list) > maxImages {
		return nil, fmt.Errorf("EPHEMERAL_IMAGES names %d images, must be 1 to %d", len(list), maxImages)
	}
	var all []Wanted
	seen := map[string]bool{}
	for _, item := range list {
		name, size, sized := strings.Cut(strings.TrimSpace(item), ":")
		w := Wanted{Image: name}
		if !images.ValidName(name) {
			return nil, fmt.Errorf("EPHEMERAL_IMAGES: image name %q: want 1 to 63 of a-z, 0-9 and \"-\"", name)
		}
		if seen[name] {
			return nil, fmt.Errorf("EPHEMERAL_IMAGES names %s twice: a node has one size of machine for each image", name)
		}
		seen[name] = true
		if sized {
			n, err := strconv.Atoi(size)
			if err != nil || n < leastMemory || n > mostMemory {
				return nil, fmt.Errorf("EPHEMERAL_IMAGES: memory %q of image %s: want %d to %d MiB", size, name, leastMemory, mostMemory)
			}
			w.MemoryMiB = n
		}
		all = append(all, w)
	}
	return all, nil
}
