package main

import (
	"encoding/json"
	"fmt"
	"io"
	"reflect"
	"text/tabwriter"

	"github.com/caarlos0/env/v11"
	"github.com/spf13/cobra"

	"github.com/ephemeral-run/ephemeral/broker"
	"github.com/ephemeral-run/ephemeral/gateway"
	"github.com/ephemeral-run/ephemeral/node"
	"github.com/ephemeral-run/ephemeral/run"
	"github.com/ephemeral-run/ephemeral/vmm/cloudhypervisor"
	"github.com/ephemeral-run/ephemeral/vmm/pool"
	"github.com/ephemeral-run/ephemeral/vmm/provision"
	"github.com/ephemeral-run/ephemeral/vmm/qemu"
)

// settings is every variable the binary reads, each declared by the package that uses it.
type settings struct {
	Log       logConfig
	Client    clientConfig
	Image     imageConfig
	Run       run.Config
	Gateway   gateway.Config
	Node      node.Config
	Broker    broker.Config
	Provision provision.Config
	Pool      pool.Config

	Hypervisor      hypervisorConfig
	QEMU            qemu.Config
	CloudHypervisor cloudhypervisor.Config
}

func load() (settings, error) {
	s, err := env.ParseAs[settings]()
	if err != nil {
		return s, fmt.Errorf("read the settings: %w (see \"ephemeral config\")", err)
	}
	return s, nil
}

// variable is one setting as "ephemeral config" shows it.
type variable struct {
	Name    string `json:"name"`
	Default string `json:"default"`
	Help    string `json:"help"`
	Secret  bool   `json:"secret,omitempty"`
}

// variables lists the settings of a struct and the structs in it, in order of declaration.
func variables(t reflect.Type) []variable {
	var all []variable
	for i := range t.NumField() {
		f := t.Field(i)
		if name, ok := f.Tag.Lookup("env"); ok {
			all = append(all, variable{Name: name, Default: f.Tag.Get("envDefault"), Help: f.Tag.Get("help"), Secret: f.Tag.Get("secret") == "true"})
		} else if f.Type.Kind() == reflect.Struct {
			all = append(all, variables(f.Type)...)
		}
	}
	return all
}

func configCommand() *cobra.Command {
	var output outputFormat
	cmd := &cobra.Command{
		Use:   "config",
		Short: "List every setting with its default and meaning",
		Long:  "Lists every EPHEMERAL_* environment variable with its default and meaning.",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			all := variables(reflect.TypeFor[settings]())
			if output.json() {
				return printJSON(cmd.OutOrStdout(), all)
			}
			w := tabwriter.NewWriter(cmd.OutOrStdout(), 0, 0, 2, ' ', 0)
			fmt.Fprintln(w, "VARIABLE\tDEFAULT\tMEANING")
			for _, v := range all {
				fmt.Fprintf(w, "%s\t%s\t%s\n", v.Name, v.Default, v.Help)
			}
			return w.Flush()
		},
	}
	output.flag(cmd)
	return cmd
}

// outputFormat is the --output flag.
type outputFormat string

func (o *outputFormat) flag(cmd *cobra.Command) {
	*o = "text"
	cmd.Flags().VarP(o, "output", "o", "text or json")
}

func (o *outputFormat) json() bool     { return *o == "json" }
func (o *outputFormat) String() string { return string(*o) }
func (o *outputFormat) Type() string   { return "format" }

func (o *outputFormat) Set(s string) error {
	if s != "text" && s != "json" {
		return fmt.Errorf("it is %q: it must be text or json", s)
	}
	*o = outputFormat(s)
	return nil
}

func printJSON(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	return e.Encode(v)
}
