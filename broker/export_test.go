package broker

import (
	"context"
	"time"
)

// SetSleep replaces the waiting between attempts.
func (b *Broker) SetSleep(f func(ctx context.Context, d time.Duration) error) { b.sleep = f }
