package gateway

import (
	"encoding/json"
	"reflect"
	"testing"
	"time"

	"github.com/gofiber/fiber/v2"
	"github.com/valyala/fasthttp"
	"pgregory.net/rapid"

	"github.com/ephemeral-run/ephemeral/run"
)

// drawn fills v, whatever its type is, so that each field of a type is reached.
func drawn(t *rapid.T, v reflect.Value) {
	switch v.Kind() {
	case reflect.String:
		v.SetString(rapid.OneOf(rapid.String(), rapid.SampledFrom([]string{"<a href=\"x\">&'\\", "\u2028\u2029\x00\x7f\b\f\n\r\t", "é😀"})).Draw(t, "text"))
	case reflect.Bool:
		v.SetBool(rapid.Bool().Draw(t, "flag"))
	case reflect.Int, reflect.Int64:
		v.SetInt(rapid.Int64().Draw(t, "number"))
	case reflect.Float64:
		v.SetFloat(rapid.OneOf(rapid.Float64Range(-1e22, 1e22), rapid.Float64Range(-1e-5, 1e-5), rapid.Map(rapid.IntRange(0, 1e9), func(us int) float64 { return float64(us) / 1000 })).Draw(t, "ms"))
	case reflect.Pointer:
		if rapid.Bool().Draw(t, "there") {
			v.Set(reflect.New(v.Type().Elem()))
			drawn(t, v.Elem())
		}
	case reflect.Slice:
		n := rapid.IntRange(0, 3).Draw(t, "length")
		v.Set(reflect.MakeSlice(v.Type(), n, n))
		for i := range n {
			drawn(t, v.Index(i))
		}
	case reflect.Map:
		v.Set(reflect.MakeMap(v.Type()))
		for range rapid.IntRange(0, 4).Draw(t, "entries") {
			key, value := reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem()
			drawn(t, key)
			drawn(t, value)
			v.SetMapIndex(key, value)
		}
	case reflect.Struct:
		if v.Type() == reflect.TypeFor[time.Time]() {
			v.Set(reflect.ValueOf(time.UnixMicro(rapid.Int64Range(0, 4e15).Draw(t, "at")).UTC()))
			return
		}
		for i := range v.NumField() {
			drawn(t, v.Field(i))
		}
	default:
		t.Fatalf("a run has a %s: say how to draw one", v.Type())
	}
}

// TestRunsAreWrittenAsEncodingJSONDoes, byte for byte.
func TestRunsAreWrittenAsEncodingJSONDoes(t *testing.T) {
	app := fiber.New()
	rapid.Check(t, func(t *rapid.T) {
		var r run.Run
		drawn(t, reflect.ValueOf(&r).Elem())
		c := app.AcquireCtx(&fasthttp.RequestCtx{})
		defer app.ReleaseCtx(c)
		want, err := json.Marshal(&r)
		if err != nil {
			t.Fatal(err)
		}
		if err := sendSmall(c, 200, &r); err != nil {
			t.Fatal(err)
		}
		if got := c.Response().Body(); string(got) != string(want) {
			t.Errorf("got  %s\nwant %s", got, want)
		}
	})
}
