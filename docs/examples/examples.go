// Package examples embeds the example requests, so that the server can offer them to people.
package examples

import "embed"

// Files holds NAME/request.json for every example.
//
//go:embed */request.json
var Files embed.FS
