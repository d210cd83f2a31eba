package kvmbox

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/ephemeral-run/ephemeral/images"
)

// recipe is that of a box: Debian 13 with what the product needs at run time, and a kernel whose KVM and landlock serve
// every hypervisor. It is built as the images of machines are, and the same agent is its first process.
func recipe() images.Recipe {
	return images.Recipe{
		Name:  "kvmbox",
		Suite: "trixie",
		Packages: []string{
			"bash", "bubblewrap", "coreutils", "findutils", "grep", "iproute2", "mount", "nftables", "procps",
			"qemu-system-x86", "redis-server", "util-linux",
		},
		Kernel: "linux-image-cloud-amd64",
		Modules: []string{
			// The devices of the box, its root and what is written over it.
			"virtio_pci", "virtio_console", "virtio_blk", "virtio_rng", "erofs", "overlay",
			// What machines need of their host.
			"kvm_amd", "tun", "nf_tables", "af_packet",
			// A panic of the box is told apart from its end.
			"pvpanic_pci",
		},
	}
}

// buildImage builds the box's image below dir, or only what changed of it.
func buildImage(ctx context.Context, dir, root string, progress func(string)) (images.Image, error) {
	agent := filepath.Join(dir, "guestagent")
	if err := Build(ctx, root, "./cmd/guestagent", agent); err != nil {
		return images.Image{}, err
	}
	return images.Build(ctx, images.Options{Dir: dir, Recipe: recipe(), Agent: agent, Progress: progress})
}

// Build builds a program of the checkout at root, statically and without the race detector, so that it runs in every place.
func Build(ctx context.Context, root, pkg, output string) error {
	return goTool(ctx, root, "build", "-trimpath", "-buildvcs=false", "-ldflags", "-s -w", "-o", output, pkg)
}

// BuildTest builds a package's tests likewise.
func BuildTest(ctx context.Context, root, pkg, output string) error {
	return goTool(ctx, root, "test", "-c", "-trimpath", "-buildvcs=false", "-ldflags", "-s -w", "-o", output, pkg)
}

func goTool(ctx context.Context, root string, args ...string) error {
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Dir = root
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("go %s %s: %w\n%s", args[0], args[len(args)-1], err, out)
	}
	return nil
}
