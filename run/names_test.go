package run

import (
	"regexp"
	"testing"

	"pgregory.net/rapid"
)

// The forms of names, as regular expressions say them.
func TestFormsOfNames(t *testing.T) {
	for name, form := range map[string]struct {
		is   func(string) bool
		want *regexp.Regexp
	}{
		"run":          {validID, regexp.MustCompile(`^run_[0-9a-f]{32}$`)},
		"organisation": {validOrg, regexp.MustCompile(`^[a-z0-9][a-z0-9_-]{0,62}$`)},
		"secret":       {validSecret, regexp.MustCompile(`^eph_[A-Za-z0-9_-]{43}$`)},
		"fingerprint":  {validFingerprint, regexp.MustCompile(`^[!-~]{1,128}$`)},
	} {
		t.Run(name, func(t *testing.T) {
			near := rapid.OneOf(rapid.StringMatching(form.want.String()), rapid.String(), rapid.StringMatching(`(run_|eph_)?[0-9a-fA-Z_-]{0,70}\n?`),
				rapid.StringMatching(`[!-~]{120,135}`))
			rapid.Check(t, func(t *rapid.T) {
				s := near.Draw(t, "s")
				if form.is(s) != form.want.MatchString(s) {
					t.Fatalf("%q: %t", s, form.is(s))
				}
			})
		})
	}
}
