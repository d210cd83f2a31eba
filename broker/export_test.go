package broker

import (
	"context"
	"time"
)

// SetSleep replaces the waiting between attempts.
func (b *Broker) SetSleep(f func(ctx context.Context, d time.Duration) error) { b.sleep = f }

// SetBodyTimeout replaces how long a guest may take to send a body.
func (b *Broker) SetBodyTimeout(d time.Duration) { b.bodyTimeout = d }
