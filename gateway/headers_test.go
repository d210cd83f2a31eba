package gateway

import (
	"strings"
	"testing"
	"time"
)

func TestIdempotencyKey(t *testing.T) {
	long := strings.Repeat("k", 255)
	tests := map[string]struct {
		values []string
		want   string
		bad    bool
	}{
		"none":              {nil, "", false},
		"structured string": {[]string{`"8e03978e-40d5-43dd-bc93-6e3d0fd3f3ae"`}, "8e03978e-40d5-43dd-bc93-6e3d0fd3f3ae", false},
		"bare":              {[]string{"8e03978e-40d5-43dd-bc93-6e3d0fd3f3ae"}, "8e03978e-40d5-43dd-bc93-6e3d0fd3f3ae", false},
		"base64":            {[]string{"a+/=="}, "a+/==", false},
		"escapes":           {[]string{`"a\"b\\c"`}, `a"b\c`, false},
		"space around":      {[]string{"\t \"k\" "}, "k", false},
		"longest":           {[]string{long}, long, false},
		"longest quoted":    {[]string{`"` + long + `"`}, long, false},
		"too long":          {[]string{long + "k"}, "", true},
		"empty":             {[]string{""}, "", true},
		"empty string":      {[]string{`""`}, "", true},
		"one quote":         {[]string{`"`}, "", true},
		"unclosed":          {[]string{`"abc`}, "", true},
		"closed by escape":  {[]string{`"abc\"`}, "", true},
		"odd escape":        {[]string{`"a\bc"`}, "", true},
		"quote inside":      {[]string{`"a"b"`}, "", true},
		"quote in bare":     {[]string{`a"b`}, "", true},
		"list":              {[]string{`a,b`}, "", true},
		"parameter":         {[]string{`"a";q=1`}, "", true},
		"twice":             {[]string{"a", "a"}, "", true},
		"space inside":      {[]string{`"a b"`}, "", true},
		"control":           {[]string{"a\x01b"}, "", true},
		"not ASCII":         {[]string{"é"}, "", true},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			got, err := idempotencyKey(tt.values)
			if got != tt.want || (err != nil) != tt.bad {
				t.Errorf("%q, %v", got, err)
			}
			if tt.bad && toProblem(err).Code != CodeInvalidIdempotencyKey {
				t.Errorf("problem %v", err)
			}
		})
	}
}

func TestPreferredWait(t *testing.T) {
	tests := map[string]time.Duration{
		"":                                  0,
		"wait=10":                           10 * time.Second,
		"respond-async, wait=100":           100 * time.Second,
		"Wait = 7":                          7 * time.Second,
		`wait="5"`:                          5 * time.Second,
		"wait=3;foo=bar, wait=9":            3 * time.Second,
		"wait":                              0,
		"wait=":                             0,
		"wait=-1":                           0,
		"wait=1.5":                          0,
		"wait=99999999999999999999":         0,
		"waiting=4":                         0,
		"handling=lenient; wait=4, wait= 2": 2 * time.Second,
	}
	for header, want := range tests {
		if got := preferredWait([]string{header}); got != want {
			t.Errorf("%q: %v, want %v", header, got, want)
		}
	}
	if got := preferredWait([]string{"respond-async", "wait=4", "wait=5"}); got != 4*time.Second {
		t.Errorf("several headers: %v", got)
	}
}

func TestBearer(t *testing.T) {
	tests := map[string]struct {
		values []string
		want   string
	}{
		"good":          {[]string{"Bearer eph_abc-._~+/="}, "eph_abc-._~+/="},
		"any case":      {[]string{"bEARER  eph_abc "}, "eph_abc"},
		"none":          {nil, ""},
		"two headers":   {[]string{"Bearer eph_abc", "Bearer eph_abc"}, ""},
		"basic":         {[]string{"Basic eph_abc"}, ""},
		"scheme only":   {[]string{"Bearer"}, ""},
		"other prefix":  {[]string{"Bearer sk-abc"}, ""},
		"space inside":  {[]string{"Bearer eph_a b"}, ""},
		"too long":      {[]string{"Bearer eph_" + strings.Repeat("a", 253)}, ""},
		"control":       {[]string{"Bearer eph_a\x00"}, ""},
		"not ASCII":     {[]string{"Bearer eph_é"}, ""},
		"without space": {[]string{"Bearereph_abc"}, ""},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			got, ok := bearer(tt.values)
			if got != tt.want || ok != (tt.want != "") {
				t.Errorf("%q, %v", got, ok)
			}
		})
	}
}

func TestValidRequestID(t *testing.T) {
	for id, want := range map[string]bool{
		"a": true, "7b9c-ABC.1_2:3/4+5=": true, strings.Repeat("a", 64): true,
		"": false, strings.Repeat("a", 65): false, "a b": false, "a\nb": false, `a"b`: false, "é": false,
	} {
		if validRequestID(id) != want {
			t.Errorf("%q: %v", id, !want)
		}
	}
}

func FuzzHeaders(f *testing.F) {
	for _, s := range []string{`"a\"b"`, "wait=5, x", "Bearer eph_x", "a;b=c", `"\`} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if key, err := idempotencyKey([]string{s}); err == nil {
			if len(key) == 0 || len(key) > 255 || strings.ContainsFunc(key, func(r rune) bool { return r <= ' ' || r > '~' }) {
				t.Errorf("key %q from %q", key, s)
			}
		}
		if secret, ok := bearer([]string{s}); ok && (!strings.HasPrefix(secret, "eph_") || len(secret) > maxBearer) {
			t.Errorf("secret %q from %q", secret, s)
		}
		if d := preferredWait([]string{s}); d < 0 {
			t.Errorf("wait %v from %q", d, s)
		}
	})
}
