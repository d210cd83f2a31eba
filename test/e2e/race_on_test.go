//go:build race

package e2e

// raceFlag builds the server with the race detector when the tests have it.
var raceFlag = []string{"-race"}

// raceMemory is how many times as much memory the race detector makes a server take: five to ten times, says
// https://go.dev/doc/articles/race_detector.
const raceMemory = 8
