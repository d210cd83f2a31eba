package main

import (
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/ephemeral-run/ephemeral/images"
	"github.com/ephemeral-run/ephemeral/node/imagepool"
	"github.com/ephemeral-run/ephemeral/vmm/provision"
)

func imageRemoveCommand() *cobra.Command {
	var output outputFormat
	cmd := &cobra.Command{
		Use:   "remove NAME",
		Short: "Remove an image that no node uses",
		Long: `Removes an image with all its builds. It is refused while a node on this host serves the image. When it is interrupted,
the image is there as before or gone; the next build, removal or collection goes on with what is left of the files.`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			s, err := load()
			if err != nil {
				return err
			}
			removed, err := images.Remove(cmd.Context(), imageDir(s), args[0])
			if err != nil {
				return err
			}
			return output.print(cmd, removed, func(w io.Writer) {
				fmt.Fprintf(w, "image %s is removed: %d builds, %d MiB\n", args[0], len(removed.Builds), removed.Bytes>>20)
			})
		},
	}
	output.flag(cmd)
	return cmd
}

// collected is what a garbage collection removed, or would.
type collected struct {
	Images    images.Removed      `json:"images"`
	Templates provision.Collected `json:"templates"`
	Dry       bool                `json:"dry_run"`
}

func imageCollectCommand() *cobra.Command {
	var output outputFormat
	var all, dry bool
	cmd := &cobra.Command{
		Use:   "gc",
		Short: "Remove the builds and templates that nothing uses",
		Long: `Removes the builds that are no longer an image and that no node on this host uses, the templates of images that are gone, and
what interrupted builds left. With --all it removes all that no node uses now: also images, but for those in EPHEMERAL_IMAGES, and
also templates of images that are there, which then cost a boot when they are wanted again.`,
		Args: arguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			s, err := load()
			if err != nil {
				return err
			}
			served, err := imagepool.Parse(s.Image.Names)
			if err != nil {
				return fmt.Errorf("settings: %w", err)
			}
			o := images.CollectOptions{All: all, Dry: dry}
			for _, w := range served {
				o.Keep = append(o.Keep, w.Image)
			}
			out := collected{Dry: dry}
			if out.Images, err = images.Collect(cmd.Context(), imageDir(s), o); err != nil {
				return err
			}
			there, err := images.Digests(imageDir(s))
			if err != nil {
				return err
			}
			if out.Templates, err = provision.Collect(s.Provision.DataDir, func(digest string) bool { return !all && there[digest] }, dry); err != nil {
				return err
			}
			return output.print(cmd, out, func(w io.Writer) { printCollected(w, out) })
		},
	}
	cmd.Flags().BoolVar(&all, "all", false, "remove all that no node uses now, images and templates too")
	cmd.Flags().BoolVar(&dry, "dry-run", false, "remove nothing, say what would be removed")
	output.flag(cmd)
	return cmd
}

// printCollected writes what was removed, a line each, and how much it was.
func printCollected(w io.Writer, c collected) {
	verb := "removed"
	if c.Dry {
		verb = "would remove"
	}
	for _, kind := range []struct {
		name  string
		which []string
	}{{"image", c.Images.Images}, {"build", c.Images.Builds}, {"template", c.Templates.Templates}} {
		for _, which := range kind.which {
			fmt.Fprintf(w, "%s %s %s\n", verb, kind.name, which)
		}
	}
	if n := c.Images.Leftovers + c.Templates.Leftovers; n > 0 {
		fmt.Fprintf(w, "%s %d directories that interrupted builds left\n", verb, n)
	}
	fmt.Fprintf(w, "%s %d MiB\n", verb, (c.Images.Bytes+c.Templates.Bytes)>>20)
}
