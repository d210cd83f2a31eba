// Package api holds the description of the HTTP API.
package api

import _ "embed"

// Description is the API in OpenAPI 3.1, as YAML. It is the source: the tests hold the server against it.
//
//go:embed openapi.yaml
var Description []byte
