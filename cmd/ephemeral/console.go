package main

import (
	"io"
	"strings"
	"sync"
)

// The steps of making a template, as provision.Provisioner.Template tells them: a line that starts so begins the step.
var templateSteps = []string{"booting", "waiting for the agent", "warming", "saving", "sealing"}

// What a keeper of templates tells at the end of making one.
var templateEnds = []string{"made in", "not made"}

// console is where a server tells what it does: its log, and on a terminal, below the log, a bar of the template that is being
// made. It is safe for concurrent use.
type console struct {
	out io.Writer

	mu  sync.Mutex
	bar *progress // nil: none is being made, or out is no terminal
	of  string    // the pool whose template the bar is about
}

// Write writes lines of the log.
func (c *console) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.bar == nil {
		return c.out.Write(p)
	}
	c.bar.close()
	n, err := c.out.Write(p)
	c.bar.show()
	return n, err
}

// template shows how far the template of a pool is. What is told of another pool meanwhile takes the bar over.
func (c *console) template(pool, told string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.bar != nil && c.of != pool {
		c.bar.close()
		c.bar = nil
	}
	for _, end := range templateEnds {
		if strings.HasPrefix(told, end) {
			if c.bar != nil {
				c.bar.close()
				c.bar = nil
			}
			return
		}
	}
	if c.bar == nil && isTerminal(c.out) {
		c.bar, c.of = newProgress(c.out, templateSteps), pool
	}
	if c.bar != nil {
		c.bar.tell(told)
	}
}
