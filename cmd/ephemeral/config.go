package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"reflect"
	"strings"
	"text/tabwriter"

	"github.com/caarlos0/env/v11"
	"github.com/spf13/cobra"

	"github.com/ephemeral-run/ephemeral/broker"
	"github.com/ephemeral-run/ephemeral/gateway"
	"github.com/ephemeral-run/ephemeral/node"
	"github.com/ephemeral-run/ephemeral/run"
	"github.com/ephemeral-run/ephemeral/run/tracing"
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
	Redis     redisConfig
	Gateway   gateway.Config
	Node      node.Config
	Listen    nodeListen
	Artifacts node.ArtifactLimits
	Broker    broker.Config
	Keys      keyConfig
	Tracing   tracing.Config
	Provision provision.Config
	Pool      pool.Config

	Hypervisor      hypervisorConfig
	QEMU            qemu.Config
	CloudHypervisor cloudhypervisor.Config
}

func load() (settings, error) {
	s, err := env.ParseAs[settings]()
	if err == nil {
		return s, nil
	}
	var parse env.ParseError
	for _, v := range variables(reflect.TypeFor[settings]()) {
		if errors.As(err, &parse) && v.field == parse.Name {
			return s, fmt.Errorf("%s=%q: %w (see \"ephemeral config\")", v.Name, os.Getenv(v.Name), parse.Err)
		}
	}
	return s, fmt.Errorf("read the settings: %w (see \"ephemeral config\")", err)
}

// misspelt lists the variables of the environment that look like settings and are none.
func misspelt(environ []string) []string {
	known := map[string]bool{}
	for _, v := range variables(reflect.TypeFor[settings]()) {
		known[v.Name] = true
	}
	var unknown []string
	for _, e := range environ {
		name, _, _ := strings.Cut(e, "=")
		if strings.HasPrefix(name, "EPHEMERAL_") && !known[name] && !strings.HasPrefix(name, "EPHEMERAL_TEST_") && name != "EPHEMERAL_BUILT" {
			unknown = append(unknown, name)
		}
	}
	return unknown
}

// variable is one setting as "ephemeral config" shows it.
type variable struct {
	Name    string `json:"name"`
	Default string `json:"default"`
	Help    string `json:"help"`
	Secret  bool   `json:"secret,omitempty"`

	field string // of the struct
}

// variables lists the settings of a struct and the structs in it, in order of declaration.
func variables(t reflect.Type) []variable {
	var all []variable
	for i := range t.NumField() {
		f := t.Field(i)
		if name, ok := f.Tag.Lookup("env"); ok {
			all = append(all, variable{Name: name, Default: f.Tag.Get("envDefault"), Help: f.Tag.Get("help"), Secret: f.Tag.Get("secret") == "true", field: f.Name})
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
		Long:  "Lists every environment variable that is a setting, with its default and meaning.",
		Args:  arguments,
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
		return errors.New("must be text or json")
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
