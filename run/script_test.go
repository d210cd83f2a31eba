package run

import (
	"strings"
	"testing"
)

func TestScriptsCarryWhatTheyUse(t *testing.T) {
	lib := "local a = {}\n-- one\nlocal function one() return a end\n\nlocal function two()\n  return one()\nend\nlocal function three() return 3 end\n"
	for src, want := range map[string]string{
		"return 1":          "",
		"return three()":    "three",
		"return two()":      "a one two",
		"return {one(), a}": "a one",
		"-- two":            "a one two", // what a comment names does no harm
	} {
		got := needed(lib, src)
		for _, name := range []string{"local a ", "function one", "function two", "function three"} {
			short := strings.TrimSpace(strings.TrimPrefix(strings.TrimPrefix(name, "local "), "function "))
			wanted := strings.Contains(" "+want+" ", " "+short+" ")
			if strings.Contains(got, name) != wanted {
				t.Errorf("of %q: %q, %s: %v", src, got, short, wanted)
			}
		}
	}
}
