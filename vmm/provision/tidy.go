package provision

import (
	"context"
	"time"
)

// Pauses between the tries of Tidy.
const (
	tidyBase = time.Second
	tidyMost = time.Minute
)

// left notes that something could not be removed.
func (p *Provisioner) left(err error) error {
	if err != nil {
		select {
		case p.untidy <- struct{}{}:
		default:
		}
	}
	return err
}

// Tidy removes what could not be removed when a machine was closed, or when making one failed: it waits for that, and then
// reconciles until it has succeeded, ever more seldom. told, which may be nil, hears of each try. It returns when ctx ends.
func (p *Provisioner) Tidy(ctx context.Context, told func(removed Residue, err error)) {
	for {
		select {
		case <-p.untidy:
		case <-ctx.Done():
			return
		}
		for pause := tidyBase; ; pause = min(2*pause, tidyMost) {
			timer := time.NewTimer(pause)
			select {
			case <-timer.C:
			case <-ctx.Done():
				timer.Stop()
				return
			}
			trying, cancel := context.WithTimeout(ctx, closeLimit)
			removed, err := p.Reconcile(trying)
			cancel()
			if told != nil && ctx.Err() == nil {
				told(removed, err)
			}
			if err == nil {
				break
			}
		}
	}
}
