package main

import (
	"io"
	"os"

	"github.com/mattn/go-isatty"

	"github.com/ephemeral-run/ephemeral/run"
)

// paint colours text for a terminal; off, text stays as it is.
type paint bool

// paintOn colours what goes to a terminal whose user has not asked for plain text (NO_COLOR, see no-color.org).
func paintOn(w io.Writer) paint {
	f, ok := w.(*os.File)
	return paint(ok && isatty.IsTerminal(f.Fd()) && os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb")
}

func (p paint) sgr(code, s string) string {
	if !p {
		return s
	}
	return "\x1b[" + code + "m" + s + "\x1b[0m"
}

func (p paint) dim(s string) string { return p.sgr("2", s) }

// event colours the name of an event as the pages do: one accent for what goes well, red for what does not.
func (p paint) event(t run.EventType, s string) string {
	switch t {
	case run.EventType(run.Succeeded), run.EventMicroVMReady, run.EventWorkerStarted:
		return p.sgr("36", s)
	case run.EventType(run.Failed), run.EventType(run.TimedOut), run.EventType(run.BudgetExhausted), run.EventBudgetWarning, run.EventRefused:
		return p.sgr("31", s)
	case run.EventModel, run.EventShell, run.EventWeb, run.EventConnection:
		return s
	}
	return p.sgr("1", s)
}
