package receipt

import (
	"crypto/ed25519"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/ephemeral-run/ephemeral/run"
)

const id = run.ID("run_0123456789abcdef0123456789abcdef")

func TestKeysStayInside(t *testing.T) {
	seed := NewSeed()
	s, err := NewSigner(seed)
	if err != nil {
		t.Fatal(err)
	}
	if text := fmt.Sprintf("%v %+v %#v", s, s, s); strings.Contains(text, seed[:8]) || !strings.Contains(text, s.ID()) {
		t.Errorf("printing shows the key: %s", text)
	}
	for _, bad := range []string{"", "x", seed[:40], seed + "AAAA"} {
		if _, err := NewSigner(bad); err == nil || bad != "" && strings.Contains(err.Error(), bad) {
			t.Errorf("%q: %v", bad, err)
		}
	}
	path := filepath.Join(t.TempDir(), "key")
	if err := os.WriteFile(path, []byte(seed+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if again, err := ReadSigner(path); err != nil || again.ID() != s.ID() {
		t.Errorf("%v, %v", again, err)
	}
	if err := os.Chmod(path, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := ReadSigner(path); err == nil {
		t.Error("a key that others may read was read")
	}
}

func TestBytesThatAreNoText(t *testing.T) {
	s, err := NewSigner(NewSeed())
	if err != nil {
		t.Fatal(err)
	}
	data, err := s.Sign(id, run.EventConnection, run.CallData{Target: "a\xffb\u2028<&>", Duration: 0.1}, "c", 1, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	text, err := json.Marshal(run.Event{Run: id, Type: run.EventConnection, Data: data})
	if err != nil {
		t.Fatal(err)
	}
	var e run.Event
	if err := json.Unmarshal(text, &e); err != nil {
		t.Fatal(err)
	}
	if err := Verify(e, map[string]ed25519.PublicKey{s.ID(): s.Public()}); err != nil {
		t.Errorf("%s: %v", text, err)
	}
	if _, err := s.Sign(id, run.EventShell, run.ShellData{}, "c", 1, time.Now()); err == nil {
		t.Error("a shell event got a receipt")
	}
}

func TestServedKeys(t *testing.T) {
	s, err := NewSigner(NewSeed())
	if err != nil {
		t.Fatal(err)
	}
	for _, k := range []run.ReceiptKey{{ID: s.ID()}, {ID: s.ID(), Public: "x"}, {ID: "other", Public: NewSeed()}} {
		if got := Keys([]run.ReceiptKey{k}); len(got) != 0 {
			t.Errorf("%+v is taken", k)
		}
	}
}

// FuzzVerify: no stored event that was not signed verifies, and none makes verification fail otherwise than by an error.
func FuzzVerify(f *testing.F) {
	s, err := NewSigner(NewSeed())
	if err != nil {
		f.Fatal(err)
	}
	keys := map[string]ed25519.PublicKey{s.ID(): s.Public()}
	good, err := s.Sign(id, run.EventModel, run.ModelData{Model: "m", Charged: 5}, "c", 1, time.UnixMicro(1))
	if err != nil {
		f.Fatal(err)
	}
	signed, err := json.Marshal(run.Event{Run: id, Type: run.EventModel, Data: good})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(string(signed))
	f.Add(strings.Replace(string(signed), `"charged_micros":5`, `"charged_micros":6`, 1))
	f.Add(`{"run":"x","type":"web","data":{"receipt":{"key":"` + s.ID() + `","signature":"AAAA"}}}`)
	f.Fuzz(func(t *testing.T, text string) {
		var e run.Event
		if json.Unmarshal([]byte(text), &e) != nil {
			return
		}
		check := CheckAll(id, []run.Event{e}, keys)
		if check.Valid == 0 {
			return
		}
		if d, ok := e.Data.(run.ModelData); !ok || d.Charged != 5 || d.Model != "m" || e.Run != id || d.Receipt.Number != 1 {
			t.Fatalf("%s verifies", text)
		}
	})
}
