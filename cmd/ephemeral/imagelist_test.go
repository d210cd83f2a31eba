package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestRecipeOf(t *testing.T) {
	file := filepath.Join(t.TempDir(), "r.yaml")
	if err := os.WriteFile(file, []byte("packages: [ripgrep]"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		args              []string
		recipe, container string
		name, fails       string
	}{
		{nil, "", "", "base", ""},
		{[]string{"base"}, "", "", "base", ""},
		{[]string{"data"}, file, "", "data", ""},
		{[]string{"tools"}, "", "layout", "tools", ""},
		{[]string{"data"}, "", "", "", "--recipe or --oci"},
		{[]string{"data"}, file, "layout", "", "not both"},
		{[]string{"data"}, "/nonexistent", "", "", "read recipe"},
	} {
		r, err := recipeOf(c.args, c.recipe, c.container)
		if c.fails == "" && (err != nil || r.Name != c.name) || c.fails != "" && (err == nil || !strings.Contains(err.Error(), c.fails)) {
			t.Errorf("%+v: %s, %v", c, r.Name, err)
		}
	}
}
