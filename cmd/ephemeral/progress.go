package main

import (
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/mattn/go-isatty"
	"github.com/schollz/progressbar/v3"
)

// barWidth is the width of a progress bar without its text, in characters.
const barWidth = 20

// The steps of a build, as images.Build tells them: a line that starts so begins the step. A step that a build does not
// have, such as Debian's in an image made of a container, is passed over.
var buildSteps = []string{"installing Debian", "unpacking", "writing root filesystem", "writing initramfs"}

// progress shows the steps of something that takes a while: as a bar on a terminal, else as a line each. It is for one
// goroutine.
type progress struct {
	w     io.Writer
	began time.Time
	steps []string
	bar   *progressbar.ProgressBar // nil: lines
}

// newProgress shows the steps on w.
func newProgress(w io.Writer, steps []string) *progress {
	p := &progress{w: w, began: time.Now(), steps: steps}
	if isTerminal(w) {
		p.bar = progressbar.NewOptions(len(steps)+1, progressbar.OptionSetWriter(w), progressbar.OptionSetWidth(barWidth),
			progressbar.OptionSetPredictTime(false), progressbar.OptionSetElapsedTime(true), progressbar.OptionShowDescriptionAtLineEnd())
	}
	return p
}

// isTerminal tells whether w is a terminal that can write over a line.
func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	return ok && isatty.IsTerminal(f.Fd()) && os.Getenv("TERM") != "dumb"
}

// tell shows what is done now. It may be the text of a program, so nothing in it reaches the terminal that could steer it.
func (p *progress) tell(text string) {
	if p.bar == nil {
		fmt.Fprintf(p.w, "%6.1fs  %s\n", time.Since(p.began).Seconds(), text)
		return
	}
	p.bar.Describe(short(text, 40))
	if i := slices.IndexFunc(p.steps, func(s string) bool { return strings.HasPrefix(text, s) }); i >= 0 && int64(i)+1 > p.bar.State().CurrentNum {
		_ = p.bar.Set(i + 1) // a terminal that is gone is no reason to stop the work
	}
}

// close takes the bar away, whatever came of the work; the line is then free for what is said of it.
func (p *progress) close() {
	if p.bar != nil {
		_ = p.bar.Clear()
	}
}

// show brings the bar back after close.
func (p *progress) show() {
	if p.bar != nil {
		_ = p.bar.RenderBlank()
	}
}

// short is text on one line of at most n characters, none of which can steer a terminal.
func short(text string, n int) string {
	line := []rune(oneLine(text))
	if len(line) > n {
		return string(line[:n-1]) + "…"
	}
	return string(line)
}
