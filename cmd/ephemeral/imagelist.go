package main

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"path/filepath"
	"slices"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/ephemeral-run/ephemeral/images"
)

// recipeOf is the recipe that a build was asked for; base when nothing was.
func recipeOf(args []string, recipe, container string) (images.Recipe, error) {
	name := images.Base().Name
	if len(args) == 1 {
		name = args[0]
	}
	switch {
	case recipe != "" && container != "":
		return images.Recipe{}, errors.New("give --recipe or --oci, not both")
	case recipe == "" && container == "" && name != images.Base().Name:
		return images.Recipe{}, fmt.Errorf("image %s: say what it is made of with --recipe or --oci", name)
	case recipe != "":
		return images.ReadRecipe(name, recipe)
	case container != "":
		return images.Recipe{Name: name}, nil
	}
	return images.Base(), nil
}

// readManifest is what the image says of itself.
func readManifest(name string) (dir string, m images.Manifest, err error) {
	s, err := load()
	if err != nil {
		return "", m, err
	}
	if !images.ValidName(name) {
		return "", m, fmt.Errorf("image name %q: want 1 to 63 of a-z, 0-9 and \"-\"", name)
	}
	dir = filepath.Join(imageDir(s), name)
	m, err = images.ReadManifest(dir)
	return dir, m, err
}

func imageListCommand() *cobra.Command {
	var output outputFormat
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List the images that are there",
		Args:  arguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			s, err := load()
			if err != nil {
				return err
			}
			names, err := images.List(imageDir(s))
			if err != nil {
				return err
			}
			all := []images.Manifest{}
			for _, name := range names {
				_, m, err := readManifest(name)
				if err != nil {
					return err
				}
				m.Name = name
				all = append(all, m)
			}
			return output.print(cmd, all, func(w io.Writer) {
				table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
				fmt.Fprintln(table, "NAME\tDIGEST\tBUILT\tMIB\tKERNEL")
				for _, m := range all {
					size := int64(0)
					for _, f := range m.Files {
						size += f.Size
					}
					fmt.Fprintf(table, "%s\t%.19s\t%s\t%d\t%s\n", m.Name, m.Digest, m.BuiltAt.Local().Format("2006-01-02 15:04"), size>>20, m.Kernel)
				}
				_ = table.Flush()
			})
		},
	}
	output.flag(cmd)
	return cmd
}

func imageShowCommand() *cobra.Command {
	var output outputFormat
	cmd := &cobra.Command{
		Use:   "show NAME",
		Short: "Show an image's manifest: digests, recipe, packages",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			_, m, err := readManifest(args[0])
			if err != nil {
				return err
			}
			return output.print(cmd, m, func(w io.Writer) { printManifest(w, m) })
		},
	}
	output.flag(cmd)
	output = "json" // the manifest as it is
	cmd.Flags().Lookup("output").DefValue = "json"
	return cmd
}

// printManifest writes what a reader looks for first: what the image is, its files and its packages.
func printManifest(w io.Writer, m images.Manifest) {
	fmt.Fprintf(w, "image %s: %s\nbuilt %s, kernel %s\n\n", m.Name, m.Digest, m.BuiltAt.Local().Format("2006-01-02 15:04"), m.Kernel)
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, name := range slices.Sorted(maps.Keys(m.Files)) {
		fmt.Fprintf(table, "%s\t%d\t%s\n", name, m.Files[name].Size, m.Files[name].SHA256)
	}
	fmt.Fprintln(table)
	for _, p := range m.Packages {
		fmt.Fprintf(table, "%s\t%s\n", p.Name, p.Version)
	}
	_ = table.Flush() // w is the command's output, whose failure print reports
}

func imageVerifyCommand() *cobra.Command {
	var output outputFormat
	cmd := &cobra.Command{
		Use:   "verify NAME",
		Short: "Read every file of an image and compare it with the manifest",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			dir, _, err := readManifest(args[0])
			if err != nil {
				return err
			}
			image, err := images.Verify(dir)
			if err != nil {
				return err
			}
			return output.print(cmd, image, func(w io.Writer) { fmt.Fprintf(w, "image %s is undamaged: %s\n", args[0], image.Digest) })
		},
	}
	output.flag(cmd)
	return cmd
}
