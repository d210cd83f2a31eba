package gateway

import (
	"strconv"
	"time"

	"github.com/gofiber/fiber/v2"
	"github.com/gofiber/fiber/v2/utils"

	"github.com/ephemeral-run/ephemeral/run"
)

// The header fields of draft-ietf-httpapi-ratelimit-headers-11; those of -10 are the same.
const (
	headerRateLimit       = "RateLimit"
	headerRateLimitPolicy = "RateLimit-Policy"
)

// policyName names the one policy that there is.
const policyName = `"requests"`

// ratePolicy is the value of RateLimit-Policy: so many requests (q) in so many seconds (w).
func ratePolicy(r run.Rate) string {
	window := max(1, (r.Burst+r.PerSecond-1)/r.PerSecond)
	return policyName + ";q=" + strconv.Itoa(r.Burst) + ";w=" + strconv.Itoa(window)
}

// allowance tells the client what its key may still do: so many requests at once (r), and further ones in so many seconds
// (t; 0: it may do all it ever may). Requests come back one by one, so t is never more than the time of one.
func (s *Server) allowance(c *fiber.Ctx, a run.Allowance) {
	if s.rate.PerSecond == 0 {
		return
	}
	b := make([]byte, 0, 48)
	b = append(b, policyName...)
	b = append(b, ";r="...)
	b = strconv.AppendInt(b, int64(a.Remaining), 10)
	b = append(b, ";t="...)
	b = strconv.AppendInt(b, int64(seconds(min(a.Full, time.Second/time.Duration(s.rate.PerSecond)))), 10)
	setHeader(c, headerRateLimit, utils.UnsafeString(b))
	setHeader(c, headerRateLimitPolicy, s.policy)
}

// seconds rounds up to whole seconds.
func seconds(d time.Duration) int { return int((d + time.Second - 1) / time.Second) }
