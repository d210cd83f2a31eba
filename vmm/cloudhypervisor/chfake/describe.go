package chfake

import (
	"encoding/json"
	"fmt"
	"os"
	"sync"

	"github.com/getkin/kin-openapi/openapi3"
)

// DescriptionVariable names the file with upstream's description of the API. Without it requests are not checked against it.
const DescriptionVariable = "EPHEMERAL_TEST_CLOUD_HYPERVISOR_API"

var description = sync.OnceValues(func() (*openapi3.T, error) {
	path := os.Getenv(DescriptionVariable)
	if path == "" {
		return nil, nil
	}
	content, err := os.ReadFile(host(path))
	if err != nil {
		return nil, err
	}
	return openapi3.NewLoader().LoadFromData(content)
})

// described checks a request's body against the description, strictly: what it does not know is refused. What it lacks,
// though the program knows it, is named here.
func (v *vmm) described(call string, body []byte) error {
	doc, err := description()
	if err != nil || doc == nil || len(body) == 0 {
		return err
	}
	item := doc.Paths.Find("/" + call)
	if item == nil || item.Put == nil || item.Put.RequestBody == nil {
		return fmt.Errorf("%s is not described", call)
	}
	schema := item.Put.RequestBody.Value.Content.Get("application/json").Schema.Value
	var value any
	if err := json.Unmarshal(body, &value); err != nil {
		return err
	}
	if o, ok := value.(object); ok && call == "vm.restore" {
		delete(o, "net_fds")
	}
	if err := schema.VisitJSON(value); err != nil {
		return fmt.Errorf("%s: %w", call, err)
	}
	return unknown(call, schema, value)
}

// unknown refuses members that the description does not have.
func unknown(at string, schema *openapi3.Schema, value any) error {
	switch value := value.(type) {
	case object:
		for name, member := range value {
			property := schema.Properties[name]
			if property == nil {
				return fmt.Errorf("%s has no %q", at, name)
			}
			if err := unknown(at+"."+name, property.Value, member); err != nil {
				return err
			}
		}
	case []any:
		for _, member := range value {
			if schema.Items == nil {
				continue
			}
			if err := unknown(at+"[]", schema.Items.Value, member); err != nil {
				return err
			}
		}
	}
	return nil
}
