package machine

import (
	"bufio"
	"bytes"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/ephemeral-run/ephemeral/broker"
	"github.com/ephemeral-run/ephemeral/broker/openaitest"
	"github.com/ephemeral-run/ephemeral/broker/secret"
	"github.com/ephemeral-run/ephemeral/node/guest"
)

// needles are the forms in which a text might be found.
func needles(text string) map[string][]byte {
	found := map[string][]byte{"plain": []byte(text), "hexadecimal": []byte(hex.EncodeToString([]byte(text)))}
	for shift := range 3 { // base64 of something that the text stands in the middle of
		all := base64.StdEncoding.EncodeToString(append(make([]byte, shift), text...))
		found[fmt.Sprintf("base64, shifted by %d", shift)] = []byte(all[(8*shift+5)/6 : (shift+len(text))*8/6])
	}
	return found
}

// search reads to the end and tells which needles it saw.
func search(r io.Reader, want map[string][]byte, seen map[string]int) (size int64, err error) {
	const chunk, overlap = 1 << 20, 256
	b := make([]byte, 0, chunk+overlap)
	for {
		n, err := r.Read(b[len(b):cap(b)])
		b, size = b[:len(b)+n], size+int64(n)
		for name, needle := range want {
			seen[name] += bytes.Count(b, needle)
		}
		if errors.Is(err, io.EOF) {
			return size, nil
		}
		if err != nil {
			return size, err
		}
		kept := min(len(b), overlap)
		b = b[:copy(b, b[len(b)-kept:])]
	}
}

// searchMemory looks through all the memory of a process that can be read.
func searchMemory(pid int, want map[string][]byte, seen map[string]int) (size int64, err error) {
	maps, err := os.Open(fmt.Sprintf("/proc/%d/maps", pid))
	if err != nil {
		return 0, err
	}
	defer maps.Close()
	memory, err := os.Open(fmt.Sprintf("/proc/%d/mem", pid))
	if err != nil {
		return 0, err
	}
	defer memory.Close()
	for lines := bufio.NewScanner(maps); lines.Scan(); {
		fields := strings.Fields(lines.Text())
		if len(fields) < 2 || fields[1][0] != 'r' {
			continue
		}
		first, last, _ := strings.Cut(fields[0], "-")
		from, err := strconv.ParseUint(first, 16, 64)
		to, err2 := strconv.ParseUint(last, 16, 64)
		if err := errors.Join(err, err2); err != nil {
			return size, err
		}
		if from > 1<<62 { // the kernel's own pages
			continue
		}
		n, _ := search(io.NewSectionReader(memory, int64(from), int64(to-from)), want, seen) // devices and holes cannot be read
		size += n
	}
	return size, nil
}

// searchFiles looks through all regular files below a directory.
func searchFiles(dir string, want map[string][]byte, seen map[string]int) (size int64, err error) {
	err = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		defer f.Close()
		n, err := search(f, want, seen)
		size += n
		return err
	})
	return size, err
}

// TestSearch: the searches find what is there, in each form and across the borders of what they read at once.
func TestSearch(t *testing.T) {
	text := hex.EncodeToString(random(20))
	for shift := range 3 {
		for _, before := range []int{0, 1<<20 - 10, 1<<20 + 246, 1<<20 + 250, 1<<21 + 3} {
			encoded := base64.StdEncoding.EncodeToString([]byte(strings.Repeat("x", shift) + text + "yyy"))
			seen := make(map[string]int)
			in := io.MultiReader(bytes.NewReader(make([]byte, before)), strings.NewReader(encoded+text+hex.EncodeToString([]byte(text))))
			if _, err := search(in, needles(text), seen); err != nil {
				t.Fatal(err)
			}
			for _, form := range []string{"plain", "hexadecimal", fmt.Sprintf("base64, shifted by %d", shift)} {
				if seen[form] == 0 {
					t.Errorf("%s after %d bytes: not found", form, before)
				}
			}
		}
	}
}

// hunt looks for a key wherever a machine's owner or guest could find it.
type hunt struct {
	h    *host
	m    *machine
	want map[string][]byte
	// prompt is a marker that is in the machine for sure.
	prompt string
}

// outside searches on the host: the hypervisor's memory, the template, the machine's directory.
func (x *hunt) outside(t *testing.T, when string) {
	stats, err := x.m.Stats()
	if err != nil {
		t.Error(err)
		return
	}
	want := map[string][]byte{"control": []byte(x.prompt)}
	for form, needle := range x.want {
		want[form] = needle
	}
	seen := make(map[string]int)
	size, err := searchMemory(stats.Pid, want, seen)
	if err != nil || size < memoryMiB<<20 {
		t.Errorf("%s: searched %d bytes of memory, %v", when, size, err)
	}
	if seen["control"] == 0 {
		t.Errorf("%s: the prompt was not found in memory: the search would find nothing", when)
	}
	t.Logf("%s: searched %d MiB of memory, found the prompt %d times", when, size>>20, seen["control"])
	delete(seen, "control")
	for _, dir := range []string{x.h.template.Dir, filepath.Join(x.h.dir, "machines", x.m.ID())} {
		size, err := searchFiles(dir, x.want, seen)
		if err != nil {
			t.Errorf("%s: %s: %v", when, dir, err)
		}
		t.Logf("%s: searched %d MiB of %s", when, size>>20, filepath.Base(filepath.Dir(dir)))
	}
	for form, n := range seen {
		if n > 0 {
			t.Errorf("%s: the key was found %d times, %s", when, n, form)
		}
	}
}

// inside lets root search in the machine. It brings the key in, so there is no use in searching outside afterwards.
func (x *hunt) inside(t *testing.T) {
	control := "control-" + hex.EncodeToString(random(16))
	for _, c := range []struct {
		patterns []string
		found    bool
	}{{[]string{control}, true}, {patterns(x.want), false}} {
		command := guest.Command{
			Args: []string{"sh", "-c", "grep -rlaF -D skip -f - /proc/[0-9]*/environ /proc/[0-9]*/cmdline /tmp /run /etc /root /home /var /dev/shm 2>/dev/null"},
			User: "root", Env: []string{"CONTROL=" + control}, Stdin: strings.NewReader(strings.Join(c.patterns, "\n") + "\n"),
		}
		out, _, exit, err := x.m.exec(t.Context(), command)
		if err != nil || exit.Outcome != "exited" || (out != "") != c.found {
			t.Errorf("search in the machine: %v, %+v, found in %q, want something %v", err, exit, out, c.found)
		}
	}
}

func patterns(want map[string][]byte) (all []string) {
	for _, needle := range want {
		all = append(all, string(needle))
	}
	return all
}

// TestKeyNeverEnters: while a provider is asked, and after it has repeated the key in its answer, the key is nowhere in
// the machine, and in nothing that is kept of the run.
func TestKeyNeverEnters(t *testing.T) {
	t.Parallel()
	h := commonHost(t)
	key, prompt := "sk-"+hex.EncodeToString(random(24)), "prompt-"+hex.EncodeToString(random(16))
	s := &session{machine: h.start(t)}
	x := &hunt{h: h, m: s.machine, want: needles(key), prompt: prompt}
	use := &openaitest.Usage{Prompt: 100, Completion: 20}
	asked := 0
	double := openaitest.NewFunc(t, key, func(n int, r *openaitest.Request) openaitest.Answer {
		asked++ // the worker asks one after the other
		if r.Header.Get("Authorization") != "Bearer "+key {
			t.Error("the provider was not asked with the key")
		}
		switch n {
		case 0:
			x.outside(t, "first call in flight")
			return openaitest.Answer{Usage: use, ToolCalls: []openaitest.ToolCall{
				openaitest.Shell("a", "env; cat /proc/[0-9]*/environ; cat /etc/* 2>/dev/null | wc -c")}}
		case 1: // the broker breaks this answer off, and the worker asks again
			return openaitest.Answer{Text: "All of it: ", Echo: true, Usage: use}
		case 2:
			x.outside(t, "third call in flight")
			x.inside(t)
			return openaitest.Answer{Text: "That is all.", Usage: use}
		}
		return openaitest.Answer{Status: http.StatusBadRequest, ErrorText: "a fourth call"}
	})
	prices := filepath.Join(t.TempDir(), "prices.yaml")
	if err := os.WriteFile(prices, []byte("models: {openai/double: {input: 1000000, output: 2000000, max_output_tokens: 1000}}"), 0o600); err != nil {
		t.Fatal(err)
	}
	got := s.work(t, broker.Config{PriceFile: prices, OpenAIBaseURL: double.BaseURL, OpenAIAPIKey: secret.Value(key)},
		"Do this: "+prompt, "openai/double")
	if !got.OK || got.Output != "That is all." || asked != 3 {
		t.Errorf("after %d calls: %+v", asked, got)
	}
	kept := map[string]string{"answer": got.Output, "events": s.events.String(), "log": s.log.String()}
	for name, text := range kept {
		for form, needle := range x.want {
			if strings.Contains(text, string(needle)) {
				t.Errorf("the key is in the %s, %s", name, form)
			}
		}
	}
	if !strings.Contains(kept["events"], "holds a credential") || !strings.Contains(kept["events"], "HOME=/home/worker") {
		t.Errorf("neither the repeated key nor the look around were reported: %s", kept["events"])
	}
}
