package cloneid

import (
	"bufio"
	"bytes"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"
)

//go:embed probe.py
var probe string

// Run runs a program in the machine with the given input and output, and returns when it has ended: nil when its exit code
// is 0.
type Run func(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) error

// Options say what to observe.
type Options struct {
	// DrawsOnly leaves out all but random draws and the clock: for machines that were not made to differ yet.
	DrawsOnly bool
	// GoProbe is the path, in the machine, of the program in the folder probe; empty: it is not there.
	GoProbe string
}

// The tries to measure a clock, and the bound of what a machine tells.
const (
	leastTries = 3
	someTries  = 20
	mostTries  = 200
	goodTrip   = 10 * time.Millisecond
	maxTold    = 1 << 20 // bytes
)

// Observe runs the probe in a machine that has Python 3, and measures its clock.
func Observe(ctx context.Context, run Run, o Options) (seen Observation, err error) {
	args := []string{"python3", "-I", "-S", "-c", probe} // without what it does not use: each start costs
	switch {
	case o.DrawsOnly:
		args = append(args, "draws")
	case o.GoProbe != "":
		args = append(args, o.GoProbe)
	}
	in, input := io.Pipe()
	output, out := io.Pipe()
	ended := make(chan error, 1)
	go func() {
		var stderr bytes.Buffer
		err := run(ctx, args, in, out, &stderr)
		if err != nil {
			err = fmt.Errorf("probe: %w: %.2000s", err, stderr.String())
		}
		_ = out.CloseWithError(io.ErrUnexpectedEOF)
		_ = in.CloseWithError(io.ErrClosedPipe)
		ended <- err
	}()
	lines := bufio.NewReaderSize(output, maxTold)
	if err = seen.read(lines); err == nil {
		err = seen.measure(input, lines)
	}
	_ = input.Close()
	_ = output.Close()
	return seen, errors.Join(err, <-ended)
}

// read takes what the probe tells, up to its empty line.
func (o *Observation) read(lines *bufio.Reader) error {
	o.Values = make(map[string]string)
	for told := 0; ; {
		line, err := lines.ReadSlice('\n')
		if err != nil {
			return err
		}
		if told += len(line); told > maxTold {
			return fmt.Errorf("the probe tells more than %d bytes", maxTold)
		}
		switch word := strings.SplitN(strings.TrimSuffix(string(line), "\n"), "\t", 3); {
		case len(word) == 1 && word[0] == "":
			return nil
		case len(word) == 2 && word[0] == "draw":
			o.Draws = append(o.Draws, word[1])
		case len(word) == 3 && word[0] == "value":
			o.Values[word[1]] = word[2]
		default:
			return fmt.Errorf("the probe tells %.200q", line)
		}
	}
}

// measure compares the clocks, until a round trip was short enough to tell: after some tries one that needs no allowance.
func (o *Observation) measure(input io.Writer, lines *bufio.Reader) error {
	o.RoundTrip = time.Hour
	enough := func(tries int) bool {
		return tries >= leastTries && o.RoundTrip <= goodTrip || tries >= someTries && o.RoundTrip <= wellMeasured || tries >= mostTries
	}
	for tries := 0; !enough(tries); tries++ {
		sent := time.Now()
		if _, err := input.Write([]byte("\n")); err != nil {
			return err
		}
		line, err := lines.ReadSlice('\n')
		if err != nil {
			return err
		}
		took := time.Since(sent)
		now, err := strconv.ParseInt(strings.TrimSpace(string(line)), 10, 64)
		if err != nil {
			return err
		}
		if took < o.RoundTrip {
			o.Ahead, o.RoundTrip = time.Unix(0, now).Sub(sent.Add(took/2)), took
		}
	}
	return nil
}
