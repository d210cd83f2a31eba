package chart

import (
	"bytes"
	"context"
	"encoding/xml"
	"errors"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/ephemeral-run/ephemeral/vmm/pool"
	"github.com/ephemeral-run/ephemeral/vmm/pool/simulate"
	"github.com/ephemeral-run/ephemeral/vmm/pool/workload"
)

func config() simulate.Config {
	return simulate.Config{
		Pool:     pool.Config{MinReady: 3, MaxReady: 3, MaxMachines: 20, RefillConcurrency: 2, MakeTimeout: time.Minute},
		Workload: workload.Workload{Process: workload.Poisson(1), Service: workload.Exp(time.Second), Count: 2000, Seed: 1},
		Restore:  workload.Const(time.Second), Settle: workload.Const(0), Destroy: workload.Const(0), MaxWait: -1, MemoryMiB: 100,
	}
}

// wellFormed fails the test unless the plot is XML with an svg element at its root and the words that must be in it.
func wellFormed(t *testing.T, name string, plot []byte, words ...string) {
	t.Helper()
	d := xml.NewDecoder(bytes.NewReader(plot))
	root := ""
	for {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if e, ok := token.(xml.StartElement); ok && root == "" {
			root = e.Name.Local
		}
	}
	if root != "svg" {
		t.Errorf("%s: the root is %q", name, root)
	}
	for _, word := range words {
		if !bytes.Contains(plot, []byte(word)) {
			t.Errorf("%s: %q is missing", name, word)
		}
	}
	if bytes.Contains(plot, []byte("NaN")) || bytes.Contains(plot, []byte("Inf")) {
		t.Errorf("%s: a coordinate is no number", name)
	}
}

func TestPlots(t *testing.T) {
	one := config()
	one.Workload.Count = 1
	for name, cfg := range map[string]simulate.Config{"full": config(), "one claim": one} {
		r, err := simulate.Run(context.Background(), cfg)
		if err != nil {
			t.Fatal(err)
		}
		rec, err := simulate.Recommend(context.Background(), cfg, simulate.Goal{MissRate: 0.02, Wait: -1})
		if err != nil {
			t.Fatal(err)
		}
		var pools, waits, tradeOff bytes.Buffer
		if err := errors.Join(Pool(&pools, r), Waits(&waits, r), TradeOff(&tradeOff, rec)); err != nil {
			t.Fatal(err)
		}
		wellFormed(t, name+": pool", pools.Bytes(), "target", "in use")
		wellFormed(t, name+": waits", waits.Bytes(), "seconds")
		wellFormed(t, name+": trade-off", tradeOff.Bytes(), "recommended", "scales itself")
	}
}

func TestTerminal(t *testing.T) {
	r, err := simulate.Run(context.Background(), config())
	if err != nil {
		t.Fatal(err)
	}
	rec, err := simulate.Recommend(context.Background(), config(), simulate.Goal{MissRate: 0.02, Wait: -1})
	if err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	if err := errors.Join(WritePool(&out, r), WriteTradeOff(&out, rec)); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"ready machines", "ready 3", "scales to 1%", "<- recommended", "█"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("%q is missing in\n%s", want, out.String())
		}
	}
	for _, line := range strings.Split(out.String(), "\n") {
		if n := len([]rune(line)); n > 110 {
			t.Errorf("a line of %d characters: %s", n, line)
		}
	}
	if testing.Verbose() {
		t.Log("\n" + out.String())
	}
}
