package images

import (
	"strings"
	"testing"
)

func TestCheckMemory(t *testing.T) {
	for _, tt := range []struct {
		recipe, mib int
		want        string
	}{
		{0, 104, ""}, {0, 512, ""}, {0, 103, "at least 104"}, {0, 64, "at least 104"}, {64, 103, "at least 104"},
		{300, 299, "at least 300"}, {300, 300, ""},
	} {
		m := Manifest{Name: "data", Recipe: Recipe{MemoryMiB: tt.recipe}}
		err := m.image("/x").CheckMemory(tt.mib)
		if (err == nil) != (tt.want == "") || err != nil && !(strings.Contains(err.Error(), tt.want) && strings.Contains(err.Error(), "data")) {
			t.Errorf("%+v: %v", tt, err)
		}
	}
}

func TestRecipeAsksForMemory(t *testing.T) {
	r, err := parseRecipe("x", []byte("memory_mib: 300"), nil)
	if err != nil || r.MemoryMiB != 300 {
		t.Errorf("%+v, %v", r, err)
	}
}
