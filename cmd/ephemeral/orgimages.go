package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/ephemeral-run/ephemeral/run"
)

func orgsImagesCommand() *cobra.Command {
	var output outputFormat
	var anyImage bool
	cmd := &cobra.Command{
		Use:   "images ORG [NAME,...]",
		Short: "Limit which images an organisation's runs may use",
		Long: `Sets the images that the runs of an organisation may use, from the next run on; --any allows all. Without names the present
ones are shown.`,
		Example: `  ephemeral orgs images org_... base,data
  ephemeral orgs images org_... --any`,
		Args: cobra.RangeArgs(1, 2),
		RunE: func(cmd *cobra.Command, args []string) error {
			if anyImage && len(args) == 2 {
				return errors.New("give names or --any, not both")
			}
			return withStore(cmd, func(ctx context.Context, s *run.Store) error {
				org, err := s.Org(ctx, args[0])
				switch {
				case err != nil:
				case len(args) == 2:
					org, err = s.AllowImages(ctx, args[0], strings.Split(args[1], ","))
				case anyImage:
					org, err = s.AllowImages(ctx, args[0], nil)
				}
				if err != nil {
					return err
				}
				return output.print(cmd, org, func(w io.Writer) {
					names := "any image"
					if len(org.Images) > 0 {
						names = strings.Join(org.Images, ", ")
					}
					fmt.Fprintf(w, "%s may use %s\n", org.ID, names)
				})
			})
		},
	}
	cmd.Flags().BoolVar(&anyImage, "any", false, "allow all images")
	output.flag(cmd)
	return cmd
}
