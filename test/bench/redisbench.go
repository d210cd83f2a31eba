package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// seeAdmit posts a run and returns the command by which the gateway admitted it, as Redis saw it: EVALSHA, the script's
// hash, its keys and its arguments.
func (c *cell) seeAdmit(ctx context.Context) ([]string, error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", c.redis.Addr())
	if err != nil {
		return nil, fmt.Errorf("watch Redis: %w", err)
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(10 * time.Second)); err != nil {
		return nil, err
	}
	if _, err := conn.Write([]byte("MONITOR\r\n")); err != nil {
		return nil, fmt.Errorf("watch Redis: %w", err)
	}
	in := bufio.NewReader(conn)
	if line, err := in.ReadString('\n'); err != nil || !strings.HasPrefix(line, "+OK") {
		return nil, fmt.Errorf("watch Redis: %q, %w", line, err)
	}
	id, err := c.postOne(ctx)
	if err != nil {
		return nil, err
	}
	for {
		line, err := in.ReadString('\n')
		if err != nil {
			return nil, fmt.Errorf("watch Redis for the admission of %s: %w", id, err)
		}
		if strings.Contains(strings.ToLower(line), `"evalsha"`) && strings.Contains(line, string(id)) {
			words, err := monitored(line)
			if err != nil {
				return nil, err
			}
			return anyNumber(words, string(id))
		}
	}
}

var quoted = regexp.MustCompile(`"(?:[^"\\]|\\.)*"`)

// monitored reads a line of MONITOR: the time, the client, and the words of the command in quotes.
func monitored(line string) ([]string, error) {
	var words []string
	for _, q := range quoted.FindAllString(line, -1) {
		w, err := strconv.Unquote(q)
		if err != nil {
			return nil, fmt.Errorf("line of MONITOR: %q: %w", q, err)
		}
		words = append(words, w)
	}
	if len(words) < 4 {
		return nil, fmt.Errorf("line of MONITOR with %d words", len(words))
	}
	return words, nil
}

// random is what redis-benchmark replaces by twelve random digits.
const random = "__rand_int__"

// anyNumber makes every call of the command another run with another idempotency key, as long as the one seen: the last
// twelve digits of both become random.
func anyNumber(words []string, id string) ([]string, error) {
	words = slices.Clone(words)
	keyed := 0
	for i, w := range words {
		if strings.Contains(w, ":idem:") {
			w = w[:len(w)-len("000000000000")] + random
			keyed++
		}
		words[i] = strings.ReplaceAll(w, id, id[:len(id)-len("000000000000")]+random)
	}
	if keyed != 1 {
		return nil, fmt.Errorf("the admission has %d idempotency keys, want 1: %.200q", keyed, words)
	}
	return words, nil
}

// ofRound makes the runs of one call of redis-benchmark others than those of any call before. It draws its numbers from the second
// and its process id, combined so that two calls can draw the same ones: all of the second's runs would then be there already.
func ofRound(words []string, n int) []string {
	mark := fmt.Sprintf("%03x", n%0x1000)
	words = slices.Clone(words)
	for i, w := range words {
		parts := strings.Split(w, random)
		for j := range len(parts) - 1 {
			parts[j] = parts[j][:len(parts[j])-len(mark)] + mark
		}
		words[i] = strings.Join(parts, random)
	}
	return words
}

// redisBenchmark sends the command with redis-benchmark and returns how many were answered in a second. It counts that
// each made a run.
func (c *cell) redisBenchmark(ctx context.Context, command []string) (float64, error) {
	queue := slices.IndexFunc(command, func(w string) bool { return strings.HasSuffix(w, ":bench:queue") })
	if queue < 0 {
		return 0, errors.New("the admission names no queue")
	}
	before, err := c.redisInt(ctx, "ZCARD", command[queue])
	if err != nil {
		return 0, err
	}
	c.bare++
	command = ofRound(command, c.bare)
	args := append([]string{"-s", c.redis.Addr(), "-c", strconv.Itoa(gatewayConnections), "-n", strconv.Itoa(gatewayRequests),
		"-r", "2000000000", "--csv"}, command...)
	out, err := exec.CommandContext(ctx, "redis-benchmark", args...).Output()
	if err != nil {
		return 0, fmt.Errorf("redis-benchmark: %w: %s", err, out)
	}
	after, err := c.redisInt(ctx, "ZCARD", command[queue])
	if err != nil {
		return 0, err
	}
	if after-before < gatewayRequests*99/100 {
		answer, err := exec.CommandContext(ctx, "redis-cli", append([]string{"-s", c.redis.Addr()}, command...)...).CombinedOutput()
		return 0, errors.Join(fmt.Errorf("redis-benchmark queued %d runs of %d; Redis answers %q", after-before, gatewayRequests, answer), err)
	}
	// The last line is the command in quotes, calls a second, and six latencies.
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	fields := strings.Split(lines[len(lines)-1], `","`)
	if len(fields) < 8 {
		return 0, fmt.Errorf("redis-benchmark said %q", out)
	}
	return strconv.ParseFloat(fields[len(fields)-7], 64)
}

// redisInt asks Redis for a number.
func (c *cell) redisInt(ctx context.Context, words ...string) (int, error) {
	out, err := exec.CommandContext(ctx, "redis-cli", append([]string{"-s", c.redis.Addr()}, words...)...).Output()
	if err != nil {
		return 0, fmt.Errorf("redis-cli %s: %w", words[0], err)
	}
	return strconv.Atoi(strings.TrimSpace(string(out)))
}
