package provision

import (
	"context"
	"errors"
	"time"

	"github.com/ephemeral-run/ephemeral/vmm"
)

// Observer is told what becomes of creations, for metrics. Its methods are called by many goroutines and must return at once.
type Observer interface {
	// Created: a machine was made, by these steps.
	Created(steps []Step)
	// Rested: a machine that is ready came to rest, by these steps.
	Rested(steps []Step)
	// CreateFailed: a creation failed at the step, or what follows it beside the ready machine did.
	CreateFailed(step string, err error)
	// Closed: a machine was taken apart.
	Closed(took time.Duration, err error)
}

type deaf struct{}

func (deaf) Created([]Step)              {}
func (deaf) Rested([]Step)               {}
func (deaf) CreateFailed(string, error)  {}
func (deaf) Closed(time.Duration, error) {}

// Observe makes the provisioner tell o what happens. It is called before the first Create.
func (p *Provisioner) Observe(o Observer) { p.told = o }

// Reasons why a creation failed, beside the names of its steps.
const (
	ReasonTemplate  = "template"  // the driver refused it
	ReasonTimeout   = "timeout"   // it took too long
	ReasonCancelled = "cancelled" // nobody wants the machine any more
	ReasonMemory    = "memory"    // the host has too little
)

// FailureReason is why a creation failed, in one word of few: one of the reasons above, or the step that failed.
func FailureReason(err error) string {
	var failed *CreateError
	switch {
	case errors.Is(err, vmm.ErrTemplate):
		return ReasonTemplate
	case errors.Is(err, context.DeadlineExceeded):
		return ReasonTimeout
	case errors.Is(err, context.Canceled), errors.Is(err, ErrClosed):
		return ReasonCancelled
	case errors.Is(err, ErrMemory):
		return ReasonMemory
	case errors.As(err, &failed):
		return failed.Step
	}
	return ReasonTemplate // there is none to make machines of
}
