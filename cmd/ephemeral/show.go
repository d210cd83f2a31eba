package main

import (
	"fmt"
	"io"
	"strings"
	"unicode"

	"github.com/ephemeral-run/ephemeral/client"
	"github.com/ephemeral-run/ephemeral/run"
)

// maxLine bounds a command on one line of the timeline, in characters.
const maxLine = 110

func printHead(w io.Writer, c client.Created) {
	replayed := ""
	if c.Replayed {
		replayed = " (replayed: this key has its run already)"
	}
	fmt.Fprintf(w, "%s%s\n", c.Run.ID, replayed)
}

// printEvent writes one line of the timeline: seconds since the run was queued, and what happened. What comes out of a
// machine is shown with its control characters taken out, so that it cannot steer a terminal.
func printEvent(w io.Writer, e run.Event) {
	p := paintOn(w)
	line := func(what, detail string) {
		fmt.Fprintf(w, "%s  %s %s\n", p.dim(fmt.Sprintf("%8.3f", e.At/1000)), p.event(e.Type, fmt.Sprintf("%-18s", what)), detail)
	}
	switch d := e.Data.(type) {
	case run.QueuedData:
		line("queued", fmt.Sprintf("budget %s reserved%s", d.Reserved, placeLine(d.Place)))
	case run.MicroVMReadyData:
		line("microVM ready", fmt.Sprintf("%s, isolation %s", d.Machine, d.Isolation))
	case run.WorkerStartedData:
		line("worker started", fmt.Sprintf("shell %s, web %s", onOff(d.Shell), onOff(d.Web)))
	case run.ModelData:
		line("model", modelLine(d))
	case run.ShellData:
		line("shell", fmt.Sprintf("$ %s", oneLine(d.Command)))
		line("", fmt.Sprintf("%s %d in %.0f ms, %d bytes", d.Outcome, d.ExitCode, d.Duration, d.Bytes))
	case run.CallData:
		line(string(e.Type), fmt.Sprintf("%s %s: %d", d.Method, oneLine(d.Target), d.Status))
	case run.BudgetWarningData:
		line("budget warning", fmt.Sprintf("%s of %s charged", d.Charged, d.Reserved))
	case run.FilesData:
		line("files", filesLine(d))
	case run.MicroVMDestroyedData:
		line("microVM destroyed", fmt.Sprintf("%d packets dropped", d.DroppedPackets))
		if d.Attempts != nil {
			for _, a := range d.Attempts.List {
				line("", oneLine(fmt.Sprintf("%d to %s %s port %d %s", a.Packets, a.Protocol, a.Address, a.Port, a.Name)))
			}
		}
	case run.EndedData:
		detail := fmt.Sprintf("%d model calls, %d tokens", d.ModelCalls, d.Tokens)
		if d.Error != nil {
			detail = fmt.Sprintf("%s: %s", d.Error.Code, oneLine(d.Error.Detail))
		}
		line(string(e.Type), detail)
	case run.Money:
		line("worker destroyed", fmt.Sprintf("%s charged, %s released", d.Charged, d.Released))
	default:
		line(string(e.Type), "")
	}
}

// placeLine tells a place in line that is worth telling.
func placeLine(p run.Place) string {
	switch {
	case p.Position <= 1 && (p.Wait == nil || *p.Wait < 1000):
		return ""
	case p.Wait == nil:
		return fmt.Sprintf(", place %d in line", p.Position)
	}
	return fmt.Sprintf(", place %d in line, about %.0f s to wait", p.Position, *p.Wait/1000)
}

func filesLine(d run.FilesData) string {
	if d.Error != "" {
		return "not collected: " + d.Error
	}
	s := fmt.Sprintf("%d left in out/, %d bytes", d.Count, d.Bytes)
	if d.Truncated {
		s += "; more than fits, the rest is lost"
	}
	if d.Skipped > 0 {
		s += fmt.Sprintf("; %d that are no files skipped", d.Skipped)
	}
	return s
}

func modelLine(d run.ModelData) string {
	s := fmt.Sprintf("%s, %d + %d tokens in %.0f ms, %s", d.Model, d.InputTokens, d.OutputTokens, d.Duration, d.Charged)
	if d.Estimated {
		s += " (estimated)"
	}
	if d.Error != "" {
		s += ": " + oneLine(d.Error)
	}
	return s
}

// printEnd writes result, money and where the time went.
func printEnd(w io.Writer, r run.Run) {
	fmt.Fprintf(w, "\n%s\n", paintOn(w).event(run.EventType(r.State), string(r.State)))
	if r.Error != nil {
		fmt.Fprintf(w, "%s: %s\n", r.Error.Code, visible(r.Error.Detail))
	}
	if r.Result != nil {
		printText(w, r.Result.Output)
		for _, s := range []*run.Stream{r.Result.Stdout, r.Result.Stderr} {
			if s != nil && s.Encoding == "" {
				printText(w, s.Content)
			} else if s != nil {
				fmt.Fprintf(w, "(%d bytes that are not text: use --output json)\n", s.Bytes)
			}
		}
	}
	if !r.State.Terminal() {
		return
	}
	fmt.Fprintf(w, "\n%s of %s charged, %s released: model %s, web %s, compute %s\n",
		r.Money.Charged, r.Money.Reserved, r.Money.Released, r.Money.Model, r.Money.Web, r.Money.Compute)
	parts := make([]string, 0, len(r.Stages))
	for _, s := range r.Stages {
		parts = append(parts, fmt.Sprintf("%s %.1f", s.Name, s.Ms))
	}
	if len(parts) > 0 {
		fmt.Fprintf(w, "ms: %s\n", strings.Join(parts, ", "))
	}
}

func printText(w io.Writer, s string) {
	if s != "" {
		fmt.Fprintln(w, strings.TrimRight(visible(s), "\n"))
	}
}

func onOff(b bool) string {
	if b {
		return "on"
	}
	return "off"
}

// oneLine is s on one line of bounded length.
func oneLine(s string) string {
	line := []rune(strings.Join(strings.Fields(visible(s)), " "))
	if len(line) > maxLine {
		return string(line[:maxLine-1]) + "…"
	}
	return string(line)
}

// visible is s without what could steer a terminal: control and format characters other than line breaks and tabs.
func visible(s string) string {
	return strings.Map(func(r rune) rune {
		if r == '\n' || r == '\t' {
			return r
		}
		if unicode.IsControl(r) || unicode.Is(unicode.Cf, r) {
			return '\uFFFD'
		}
		return r
	}, s)
}
