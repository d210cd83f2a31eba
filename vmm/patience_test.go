package vmm

import "testing"

func TestPatience(t *testing.T) {
	for text, want := range map[string]float64{
		"0.10 0.20 0.30 1/234 5678\n": 1, "8.00 1.00 1.00 9/234 5678\n": 4, "900.00 1.00 1.00 9/234 5678\n": mostPatience,
		"": 1, "NaN 0 0": 1, "-3 0 0": 1, "x": 1,
	} {
		if got := patience(text, 2); got != want {
			t.Errorf("%q: %v, want %v", text, got, want)
		}
	}
	if got := Patience(); got < 1 || got > mostPatience {
		t.Errorf("%v on this host", got)
	}
}
