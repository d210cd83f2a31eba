// Package images builds and verifies what machines boot from: kernel, initramfs and read-only root filesystem, with a
// manifest that holds the SHA-256 of each.
package images

import "time"

// Image is a verified image on disk.
type Image struct {
	Name      string    `json:"name"`   // e.g. "base"
	Digest    string    `json:"digest"` // "sha256:..." over the manifest's file digests; names the image
	Kernel    string    `json:"-"`      // absolute paths
	Initramfs string    `json:"-"`
	RootFS    string    `json:"-"` // EROFS
	BuiltAt   time.Time `json:"built_at"`

	LeastMemoryMiB int `json:"-"` // that the recipe asks for, of a machine; see CheckMemory
}
