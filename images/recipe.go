package images

import (
	"crypto/sha256"
	_ "embed"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
)

// customizeScript runs in the host once the packages are in; it is given the root filesystem's directory.
//
//go:embed customize.sh
var customizeScript []byte

// layoutVersion changes when code of this package makes another root filesystem or another set of modules from the same
// recipe and script.
const layoutVersion = 1

// Recipe says what an image is made from.
type Recipe struct {
	Name     string   `json:"name"`
	Suite    string   `json:"suite"`    // Debian suite
	Packages []string `json:"packages"` // beside the essential ones
	Kernel   string   `json:"kernel"`   // Debian kernel package
	Modules  []string `json:"modules"`  // kernel modules wanted beside those they depend on

	Files     []RecipeFile `json:"files,omitempty"`
	Commands  []string     `json:"commands,omitempty"`   // run in the root filesystem when packages and files are in
	MemoryMiB int          `json:"memory_mib,omitempty"` // least memory of a machine; 0: what every machine needs

	OCI string `json:"oci,omitempty"` // digest of the container image that takes the place of suite and packages
}

// Base is the recipe of the default image: Debian 13 with a shell and the tools commands of a run reach for.
func Base() Recipe {
	return Recipe{
		Name:     "base",
		Suite:    "trixie",
		Packages: []string{"bash", "ca-certificates", "coreutils", "curl", "git", "jq", "procps", "python3"},
		Kernel:   "linux-image-cloud-amd64",
		Modules: []string{
			// Devices, of both hypervisors.
			"virtio_pci", "virtio_console", "virtio_blk", "virtio_net", "virtio_rng",
			// The root filesystem and what is written over it.
			"erofs", "overlay",
			// The connection to the host where the hypervisor has vsock.
			"vmw_vsock_virtio_transport",
			// A panic and a fork of the machine are made known.
			"pvpanic_pci", "vmgenid",
			// Raw sockets; built in with the cloud kernel.
			"af_packet",
		},
	}
}

// inputs is the digest over all that root filesystem, kernel and modules are made from. Packages are taken as they are in
// the archive on the day of the build.
func (r Recipe) inputs() (string, error) {
	b, err := json.Marshal(r)
	if err != nil {
		return "", fmt.Errorf("encode recipe %s: %w", r.Name, err)
	}
	h := sha256.New()
	fmt.Fprintf(h, "%d\n%s\n%s", layoutVersion, b, customizeScript)
	if len(r.Files) > 0 || len(r.Commands) > 0 {
		io.WriteString(h, recipeHook)
	}
	return "sha256:" + hex.EncodeToString(h.Sum(nil)), nil
}
