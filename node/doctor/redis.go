package doctor

import (
	"context"
)

// checkPersistence asks the configured Redis whether it keeps what it acknowledges.
func checkPersistence(ctx context.Context, c *Config) Check {
	if c.RedisURL == "" {
		return ok("the private redis-server appends to a file and never evicts")
	}
	p, err := c.Host.Persistence(ctx, c.RedisURL)
	switch {
	case err != nil:
		return fail("start it, or correct EPHEMERAL_REDIS_URL", "%v", err)
	case p.Eviction != "" && p.Eviction != "noeviction":
		return fail("set maxmemory-policy noeviction", "Redis evicts by %s: runs and money would vanish when its memory is full", p.Eviction)
	case p.AppendOnly == "no":
		return fail("set appendonly yes", "Redis keeps no append-only file: a restart loses runs and money that were acknowledged")
	case p.Fsync == "no":
		return warn("set appendfsync always, or at least everysec", "Redis leaves syncing to the kernel: a crash of its host loses up to half a minute")
	case p.AppendOnly == "" || p.Eviction == "":
		return warn("ask whoever runs it for appendonly yes and maxmemory-policy noeviction", "Redis does not tell its settings")
	case p.Fsync == "always":
		return ok("appends to a file that is synced at each write, and never evicts")
	}
	return warn("set appendfsync always", "Redis syncs every second: when it is killed or its host crashes, up to the last two seconds of what was acknowledged can be lost")
}
