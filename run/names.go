package run

import "strings"

// The forms of names are checked on every request: by tables, since regular expressions were a measurable part of one.

// alphabet is a set of bytes.
type alphabet [256]bool

func newAlphabet(bytes string) (a alphabet) {
	for i := range len(bytes) {
		a[bytes[i]] = true
	}
	return a
}

// spells tells whether s has no other bytes.
func (a *alphabet) spells(s string) bool {
	for i := range len(s) {
		if !a[s[i]] {
			return false
		}
	}
	return true
}

const (
	digits    = "0123456789"
	lowercase = "abcdefghijklmnopqrstuvwxyz"
)

var (
	hexadecimal = newAlphabet(digits + "abcdef")
	urlSafe     = newAlphabet(digits + lowercase + strings.ToUpper(lowercase) + "_-") // base64url, and ids of keys
	orgName     = newAlphabet(digits + lowercase + "_-")
)

// validID: "run_" and 32 lower-case hexadecimal digits.
func validID(s string) bool {
	hex, ok := strings.CutPrefix(s, "run_")
	return ok && len(hex) == 32 && hexadecimal.spells(hex)
}

// validUpload: "upl_" and 32 hexadecimal digits.
func validUpload(s string) bool {
	hex, ok := strings.CutPrefix(s, "upl_")
	return ok && len(hex) == 32 && hexadecimal.spells(hex)
}

// validOrg: 1 to 63 of a-z, 0-9, _ and -, a letter or digit first.
func validOrg(s string) bool {
	return len(s) >= 1 && len(s) <= 63 && s[0] != '_' && s[0] != '-' && orgName.spells(s)
}

// validSecret: "eph_" and 43 characters of base64url.
func validSecret(s string) bool {
	random, ok := strings.CutPrefix(s, "eph_")
	return ok && len(random) == 43 && urlSafe.spells(random)
}

// validFingerprint: 1 to 128 visible ASCII characters.
func validFingerprint(s string) bool {
	for i := range len(s) {
		if s[i] <= ' ' || s[i] > '~' {
			return false
		}
	}
	return len(s) >= 1 && len(s) <= 128
}
