//go:build race

package e2e

// raceFlag builds the server with the race detector when the tests have it.
var raceFlag = []string{"-race"}
