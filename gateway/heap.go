package gateway

import (
	"runtime"
	"runtime/debug"
)

// heapFloor is counted as live by the garbage collector, never touched, and so takes no memory. What a gateway holds is a few
// megabytes, renewed by each request: without it the collector would run ten times a second.
const heapFloor = 64 << 20

// raiseHeap keeps heapFloor until the returned function is called. A process that was given little memory goes without.
func raiseHeap() (lower func()) {
	if debug.SetMemoryLimit(-1) < 16*heapFloor {
		return func() {}
	}
	floor := make([]byte, heapFloor)
	return func() { runtime.KeepAlive(floor) }
}
