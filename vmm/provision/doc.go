// Package provision puts the parts of a machine together and takes them apart again: directory, tap, jail and VMM. It makes
// templates, creates machines from them, and removes what an earlier life of the node left.
//
// # Files
//
// Under Config.DataDir:
//
//	machines/<id>/        one machine's directory, owned by its user, mode 0700
//	templates/<key>/      a template: ram (0444), the driver's device state, manifest.json
//	templates/<key>.lock  held while that template is being made
//	node                  the node's id
//
// A directory in use is locked (flock(2)) by the process that uses it, and the lock goes with the process. So what is not
// locked was left by one that died, and several nodes can share a data directory.
//
// Directories on the way to these are searchable but not readable by the machines' users: each sees its own directory and,
// read-only, the files of its image and template that its jail shows it.
package provision
