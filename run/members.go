package run

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"
	"unicode/utf8"
)

// OrgMember is a person or a service of an organisation, who holds some of its keys.
type OrgMember struct {
	ID        string    `json:"id"`
	Org       string    `json:"org"`
	Name      string    `json:"name"`
	CreatedAt time.Time `json:"created_at"`
}

// maxMembers bounds the members of one organisation.
const maxMembers = 10_000

// errMembers: the organisation has as many members as it may.
var errMembers = errors.New("too many members")

var memberPattern = regexp.MustCompile(`^mem_[0-9a-f]{16}$`)

var memberScript, unmemberScript = loadScript("member"), loadScript("unmember")

// AddMember adds a member to an organisation. ErrNotFound: no such organisation; ErrRange: a bad name, or there are
// 10,000 members.
//
// Script member.lua.
func (s *Store) AddMember(ctx context.Context, org, name string) (OrgMember, error) {
	switch {
	case !validOrg(org):
		return OrgMember{}, fmt.Errorf("add member to organisation %.64q: %w", org, ErrNotFound)
	case len(name) > maxNameBytes || !utf8.ValidString(name):
		return OrgMember{}, fmt.Errorf("name of a member: want at most %d bytes of UTF-8: %w", maxNameBytes, ErrRange)
	}
	m := OrgMember{ID: "mem_" + word(8), Org: org, Name: name, CreatedAt: time.UnixMicro(s.micros()).UTC()}
	raw, err := encode("member", m)
	if err != nil {
		return OrgMember{}, fmt.Errorf("add member to %s: %w", org, err)
	}
	r, err := s.eval(ctx, memberScript, []string{s.keys.org(org), s.keys.members(org)}, m.ID, raw, maxMembers)
	if err == nil && r.code() == "FULL" {
		err = fmt.Errorf("%w: %w", errMembers, ErrRange)
	} else if err == nil {
		err = refused(r)
	}
	if err != nil {
		return OrgMember{}, fmt.Errorf("add member to %s: %w", org, err)
	}
	return m, nil
}

// Members returns an organisation's members, oldest first.
func (s *Store) Members(ctx context.Context, org string) ([]OrgMember, error) {
	if _, err := s.Org(ctx, org); err != nil {
		return nil, fmt.Errorf("list members: %w", err)
	}
	raw, err := s.rdb.HVals(ctx, s.keys.members(org)).Result()
	if err != nil {
		return nil, fmt.Errorf("list members of %s: %w", org, unavailable(err))
	}
	list := make([]OrgMember, len(raw))
	for i, v := range raw {
		if err := json.Unmarshal([]byte(v), &list[i]); err != nil {
			return nil, fmt.Errorf("list members of %s: stored member: %w", org, err)
		}
	}
	slices.SortFunc(list, func(a, b OrgMember) int {
		return cmp.Or(a.CreatedAt.Compare(b.CreatedAt), strings.Compare(a.ID, b.ID))
	})
	return list, nil
}

// RemoveMember removes a member and revokes all of its keys at once. ErrNotFound: no such organisation or member.
//
// Script unmember.lua.
func (s *Store) RemoveMember(ctx context.Context, org, id string) error {
	if !validOrg(org) || !memberPattern.MatchString(id) {
		return fmt.Errorf("remove member %.64q: %w", id, ErrNotFound)
	}
	prefix, suffix, _ := strings.Cut(s.keys.secret("<sum>"), "<sum>")
	r, err := s.eval(ctx, unmemberScript, []string{s.keys.members(org), s.keys.memberKeys(org, id)}, id, s.micros(), prefix, suffix,
		s.keys.revoked(), org)
	if err == nil {
		err = refused(r)
	}
	if err != nil {
		return fmt.Errorf("remove member %s of %s: %w", id, org, err)
	}
	return nil
}
