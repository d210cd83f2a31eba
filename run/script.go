package run

import (
	"context"
	"embed"
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"unicode"

	"github.com/redis/go-redis/v9"
)

//go:embed lua/*.lua
var sources embed.FS

// script is one transition. Redis knows it by its hash; when Redis has forgotten it (NOSCRIPT: restart, fail-over,
// SCRIPT FLUSH) it is sent whole again.
type script struct {
	name string
	*redis.Script
	lax bool // may be lost in a fail-over: nobody relies on what it did
}

func loadScript(name string) *script {
	lib, err := sources.ReadFile("lua/lib.lua")
	if err != nil {
		panic(err) // embedded: cannot be missing
	}
	src, err := sources.ReadFile("lua/" + name + ".lua")
	if err != nil {
		panic(err)
	}
	return &script{name: name, Script: redis.NewScript(needed(stateTable()+string(lib), string(src)) + string(src))}
}

// definition is the beginning of a definition in lib.lua.
var definition = regexp.MustCompile(`(?m)^local (?:function )?(\w+)`)

// needed is what src uses of lib, directly or not. Redis makes every function of a script anew at each call, whether it is
// called or not. A definition uses only what stands before it, as Lua's local names do.
func needed(lib, src string) string {
	used := map[string]bool{}
	use := func(text string) {
		for _, w := range strings.FieldsFunc(text, func(c rune) bool { return c != '_' && !unicode.IsLetter(c) && !unicode.IsDigit(c) }) {
			used[w] = true
		}
	}
	use(src)
	kept := ""
	at := definition.FindAllStringSubmatchIndex(lib, -1)
	for i, end := len(at)-1, len(lib); i >= 0; i-- {
		begin, name := at[i][0], lib[at[i][2]:at[i][3]]
		if used[name] {
			text := lib[begin:end]
			use(text)
			kept = text + kept
		}
		end = begin
	}
	return kept
}

func loadLax(name string) *script {
	sc := loadScript(name)
	sc.lax = true
	return sc
}

// reply is what a script returned: a code and values.
type reply []any

func (r reply) code() string { return r.text(0) }

// text is the i-th value as text; empty if there is none.
func (r reply) text(i int) string {
	if i >= len(r) {
		return ""
	}
	switch v := r[i].(type) {
	case string:
		return v
	case int64:
		return strconv.FormatInt(v, 10)
	}
	return ""
}

// int is the i-th value as a number, which scripts write as such or as text: what cannot be read is a damaged store.
func (r reply) int(i int) (int64, error) {
	if i < len(r) {
		if n, ok := r[i].(int64); ok {
			return n, nil
		}
	}
	n, err := strconv.ParseInt(r.text(i), 10, 64)
	if err != nil {
		return 0, fmt.Errorf("store answered %q where a number belongs: %w", r.text(i), err)
	}
	return n, nil
}

// list is the i-th value as a list of texts.
func (r reply) list(i int) []string {
	if i >= len(r) {
		return nil
	}
	values, _ := r[i].([]any)
	texts := make([]string, len(values))
	for j, v := range values {
		texts[j], _ = v.(string)
	}
	return texts
}

// fields is the i-th value, a flat list of names and values, as a map.
func (r reply) fields(i int) map[string]string {
	if i >= len(r) {
		return nil
	}
	list, _ := r[i].([]any)
	m := make(map[string]string, len(list)/2)
	for j := 0; j+1 < len(list); j += 2 {
		name, _ := list[j].(string)
		value, _ := list[j+1].(string)
		m[name] = value
	}
	return m
}

// eval runs a script and returns its reply whatever its code. The error is ErrUnavailable or a bug.
func (s *Store) eval(ctx context.Context, sc *script, keys []string, args ...any) (reply, error) {
	var v []any
	var err error
	if s.cfg.Replicas == 0 || sc.lax {
		v, err = s.evalBatched(ctx, sc, keys, args)
		err = unavailable(err)
	} else {
		v, err = s.evalDurably(ctx, sc, keys, args)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", sc.name, err)
	}
	if len(v) == 0 {
		return nil, fmt.Errorf("%s: empty answer", sc.name)
	}
	return reply(v), nil
}

// evalMany runs a script once for each list of keys, each with its own last argument, in one round trip.
func (s *Store) evalMany(ctx context.Context, sc *script, keys [][]string, args []string) ([]reply, error) {
	for attempt := 0; ; attempt++ {
		cmds := make([]*redis.Cmd, len(keys))
		err := s.pipelined(ctx, func(p redis.Pipeliner) {
			for i := range keys {
				cmds[i] = sc.EvalSha(ctx, p, keys[i], args[i])
			}
		})
		if redis.HasErrorPrefix(err, "NOSCRIPT") && attempt == 0 {
			err = unavailable(sc.Load(ctx, s.rdb).Err())
			if err == nil {
				continue
			}
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", sc.name, err)
		}
		replies := make([]reply, len(cmds))
		for i, c := range cmds {
			v, err := c.Slice()
			if err != nil || len(v) == 0 {
				return nil, fmt.Errorf("%s: answer: %w", sc.name, err)
			}
			replies[i] = v
		}
		return replies, nil
	}
}

// errCorrupt: the account and the record contradict each other; nothing was changed.
var errCorrupt = errors.New("the account and the run's hold contradict each other (see: ephemeral orgs audit)")

// refusals maps the codes that scripts refuse with to what callers decide on.
var refusals = map[string]error{
	"BUDGET":   ErrBudget,
	"CHANGED":  ErrChanged,
	"CONFLICT": ErrIdempotencyConflict,
	"CORRUPT":  errCorrupt,
	"EXISTS":   ErrExists,
	"FULL":     ErrQueueFull,
	"FUNDS":    ErrInsufficientFunds,
	"IMAGE":    ErrImage,
	"LEASE":    ErrLeaseLost,
	"NOTFOUND": ErrNotFound,
	"RANGE":    ErrRange,
	"STATE":    ErrState,
	"FULLUP":   ErrUploadsFull,
}

// refused is the error of a reply whose code is neither "OK" nor one of the others given; nil if it is.
func refused(r reply, others ...string) error {
	code := r.code()
	if code == "OK" {
		return nil
	}
	for _, o := range others {
		if code == o {
			return nil
		}
	}
	if err, ok := refusals[code]; ok {
		return err
	}
	return fmt.Errorf("store answered %q", code)
}
