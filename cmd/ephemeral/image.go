package main

import (
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/ephemeral-run/ephemeral/images"
	"github.com/ephemeral-run/ephemeral/node/doctor"
	"github.com/ephemeral-run/ephemeral/node/imagepool"
	"github.com/ephemeral-run/ephemeral/run"
)

// imageConfig says which images machines boot from.
type imageConfig struct {
	Dir       string   `env:"EPHEMERAL_IMAGE_DIR" help:"directory of images (empty: images in the data directory)"`
	Names     []string `env:"EPHEMERAL_IMAGES" envDefault:"base" help:"images that the node serves, with commas between them; NAME:MIB gives an image's machines another memory"`
	MemoryMiB int      `env:"EPHEMERAL_POOLS_MEMORY_MIB" envDefault:"0" help:"memory of the machines of all images together, MiB (0: as much as the host has free)"`
}

// imageDir is the directory of images.
func imageDir(s settings) string {
	if s.Image.Dir != "" {
		return s.Image.Dir
	}
	return filepath.Join(s.Provision.DataDir, "images")
}

// firstImage is the name of the first image that the node serves, and the memory of its machines.
func firstImage(s settings) (name string, memoryMiB int) {
	name, memoryMiB = run.DefaultImage, s.Provision.MemoryMiB
	if all, err := imagepool.Parse(s.Image.Names); err == nil {
		if name = all[0].Image; all[0].MemoryMiB > 0 {
			memoryMiB = all[0].MemoryMiB
		}
	}
	return name, memoryMiB
}

func imageCommand() *cobra.Command {
	return group("image", "Build, list, verify and remove the images that machines boot from", "", imageBuildCommand(), imageListCommand(), imageShowCommand(), imageVerifyCommand(),
		imageRemoveCommand(), imageCollectCommand())
}

func imageBuildCommand() *cobra.Command {
	var output outputFormat
	var agent, recipe, container string
	var rebuild bool
	cmd := &cobra.Command{
		Use:   "build [NAME]",
		Short: "Build the image, or only what changed of it",
		Long: `Builds the image: a Debian root filesystem, its kernel, and an initramfs with the guest agent. What is there and made
from the same inputs is kept. It needs root, mmdebstrap, mkfs.erofs and a Debian mirror; the first build takes about a
minute.`,
		Example: `  ephemeral image build
  ephemeral image build data --recipe data.yaml
  ephemeral image build tools --oci ./layout`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			s, err := load()
			if err != nil {
				return err
			}
			wanted, err := recipeOf(args, recipe, container)
			if err != nil {
				return err
			}
			if agent == "" {
				if agent, err = besideUs("guestagent"); err != nil {
					return err
				}
			}
			shown := newProgress(cmd.ErrOrStderr(), buildSteps)
			image, err := images.Build(cmd.Context(), images.Options{
				Dir: imageDir(s), Recipe: wanted, OCI: container, Agent: agent, Rebuild: rebuild, Progress: shown.tell,
			})
			shown.close()
			if err != nil {
				return err
			}
			return output.print(cmd, image, func(w io.Writer) {
				fmt.Fprintf(w, "image %s: %s\n", image.Name, image.Digest)
			})
		},
	}
	cmd.Flags().StringVar(&agent, "agent", "", "guest agent to put into it (default: guestagent beside this program)")
	cmd.Flags().StringVar(&recipe, "recipe", "", "file that says what is added to base: packages, files, commands")
	cmd.Flags().StringVar(&container, "oci", "", "OCI layout, or archive of docker save, to make the root filesystem of")
	cmd.Flags().BoolVar(&rebuild, "rebuild", false, "take today's packages even if nothing changed")
	output.flag(cmd)
	return cmd
}

// besideUs is a program in the directory of this one.
func besideUs(name string) (string, error) {
	self, err := os.Executable()
	if err != nil {
		return "", fmt.Errorf("find this program: %w", err)
	}
	path := filepath.Join(filepath.Dir(self), name)
	if _, err := os.Stat(path); err != nil {
		return "", fmt.Errorf("no %s beside this program: build it (make build) or name it with --agent: %w", name, err)
	}
	return path, nil
}

func doctorCommand() *cobra.Command {
	var output outputFormat
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Check whether this host can run machines, and say what to do where it cannot",
		Args:  arguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			s, err := load()
			if err != nil {
				return err
			}
			image, memory := firstImage(s)
			checks := doctor.Run(cmd.Context(), doctor.Config{
				DataDir: s.Provision.DataDir, ImageDir: filepath.Join(imageDir(s), image), RedisURL: s.Run.RedisURL,
				QEMU: s.QEMU.Path, CloudHypervisor: s.CloudHypervisor.Path, Hypervisor: s.Hypervisor.Name, MemoryMiB: memory, MinReady: s.Pool.MinReady, MaxMachines: s.Pool.MaxMachines,
			})
			if output.json() {
				err = printJSON(cmd.OutOrStdout(), checks)
			} else {
				err = doctor.WriteText(cmd.OutOrStdout(), checks)
			}
			if err != nil {
				return err
			}
			if doctor.Worst(checks) == doctor.Fail {
				return exitCode(1)
			}
			return nil
		},
	}
	output.flag(cmd)
	return cmd
}
