package run

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"
)

// maxUsageDays bounds the days that one call of Usage returns.
const maxUsageDays = 366

// DayUsage sums up an organisation's runs that ended on one day.
type DayUsage struct {
	Day           string `json:"day"` // UTC, as 2006-01-02
	Runs          int64  `json:"runs"`
	Charged       Micros `json:"charged_micros"` // model, web and compute
	Model         Micros `json:"model_micros"`
	Web           Micros `json:"web_micros"`
	Compute       Micros `json:"compute_micros"`
	ModelCalls    int64  `json:"model_calls"`
	InputTokens   int64  `json:"input_tokens"`
	OutputTokens  int64  `json:"output_tokens"`
	TotalTokens   int64  `json:"total_tokens"`
	ShellCommands int64  `json:"shell_commands"`
}

// Usage returns an organisation's usage of each day from the first to the last, both included, also of days without
// runs, oldest first. Of both only the date in UTC counts. It is counted when runs end and kept for good. ErrRange: the
// last day is before the first, or there are more than 366; ErrNotFound: no such organisation.
func (s *Store) Usage(ctx context.Context, org string, first, last time.Time) ([]DayUsage, error) {
	if _, err := s.Org(ctx, org); err != nil {
		return nil, fmt.Errorf("usage: %w", err)
	}
	from, to := dayOf(first), dayOf(last)
	if to < from || to-from >= maxUsageDays {
		return nil, fmt.Errorf("usage of %s: %d days, want 1 to %d: %w", org, to-from+1, maxUsageDays, ErrRange)
	}
	fields := make([]string, 0, to-from+1)
	for d := from; d <= to; d++ {
		fields = append(fields, strconv.FormatInt(d, 10))
	}
	raw, err := s.rdb.HMGet(ctx, s.keys.usage(org), fields...).Result()
	if err != nil {
		return nil, fmt.Errorf("usage of %s: %w", org, unavailable(err))
	}
	days := make([]DayUsage, len(raw))
	for i, v := range raw {
		line, _ := v.(string)
		if days[i], err = parseDayUsage(line); err != nil {
			return nil, fmt.Errorf("usage of %s on day %s: %w", org, fields[i], err)
		}
		days[i].Day = time.Unix((from+int64(i))*secondsOfDay, 0).UTC().Format(time.DateOnly)
	}
	return days, nil
}

const secondsOfDay = 24 * 60 * 60

// dayOf is the number of days from 1970 to t.
func dayOf(t time.Time) int64 {
	u := t.Unix()
	if u < 0 {
		return (u - secondsOfDay + 1) / secondsOfDay
	}
	return u / secondsOfDay
}

// parseDayUsage reads what tally() in lib.lua wrote; nothing gives zeros.
func parseDayUsage(line string) (DayUsage, error) {
	var n [10]int64
	fields := strings.Fields(line)
	if len(fields) != 0 && len(fields) != len(n) {
		return DayUsage{}, fmt.Errorf("stored counts %.200q: want %d", line, len(n))
	}
	for i, f := range fields {
		v, err := strconv.ParseInt(f, 10, 64)
		if err != nil {
			return DayUsage{}, fmt.Errorf("stored counts: %w", err)
		}
		n[i] = v
	}
	return DayUsage{Runs: n[0], Charged: Micros(n[1]), Model: Micros(n[2]), Web: Micros(n[3]), Compute: Micros(n[4]),
		ModelCalls: n[5], InputTokens: n[6], OutputTokens: n[7], TotalTokens: n[8], ShellCommands: n[9]}, nil
}
