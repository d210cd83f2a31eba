// Package chart draws what a simulation of a pool gave: as SVG files and on a terminal.
package chart

import (
	"fmt"
	"image/color"
	"io"
	"math"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/text"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"

	"github.com/ephemeral-run/ephemeral/vmm/pool/simulate"
)

const width, height = 8 * vg.Inch, 4.5 * vg.Inch

// Colours that the colour-blind can tell apart (M. Okabe, K. Ito 2008).
var (
	blue   = color.RGBA{0x00, 0x72, 0xb2, 0xff}
	orange = color.RGBA{0xe6, 0x9f, 0x00, 0xff}
	green  = color.RGBA{0x00, 0x9e, 0x73, 0xff}
	red    = color.RGBA{0xd5, 0x5e, 0x00, 0xff}
	grey   = color.RGBA{0x99, 0x99, 0x99, 0xff}
)

// Pool draws the pool over time as SVG: target, ready, in use, and claims a second.
func Pool(w io.Writer, r simulate.Result) error {
	p := newPlot("The pool over time", "hours", "machines; claims a second")
	lines := []struct {
		name   string
		colour color.Color
		value  func(simulate.Sample) float64
	}{
		{"claims a second", grey, func(s simulate.Sample) float64 { return s.ArrivalsASecond }},
		{"in use", blue, func(s simulate.Sample) float64 { return float64(s.Counts.Leased) }},
		{"ready", green, func(s simulate.Sample) float64 { return float64(s.Counts.Ready) }},
		{"target", red, func(s simulate.Sample) float64 { return float64(s.Target) }},
	}
	for _, l := range lines {
		points := make(plotter.XYs, len(r.Series))
		for i, s := range r.Series {
			points[i] = plotter.XY{X: s.At.Hours(), Y: l.value(s)}
		}
		if err := addLine(p, l.name, l.colour, points); err != nil {
			return err
		}
	}
	p.Y.Min = 0
	return write(w, p)
}

// Waits draws how long claims wait as SVG: the wait that a share of the claims does not exceed.
func Waits(w io.Writer, r simulate.Result) error {
	p := newPlot("Wait for a machine", "percent of claims that wait no longer", "seconds")
	var points plotter.XYs
	for share := 0.0; share <= 99.9; share += 0.1 {
		points = append(points, plotter.XY{X: share, Y: r.Wait(share / 100)})
	}
	if err := addLine(p, fmt.Sprintf("%d claims", r.Served), blue, points); err != nil {
		return err
	}
	p.Y.Min = 0
	p.Legend.Left = true
	return write(w, p)
}

// TradeOff draws the policies that were tried as SVG: misses against memory, with the chosen one marked.
func TradeOff(w io.Writer, r simulate.Recommendation) error {
	p := newPlot("Misses against memory", "memory, GiB-hours", "percent of claims that find no machine ready")
	var fixed, scaled plotter.XYs
	for _, point := range r.Curve {
		if xy := at(point); point.TargetMissRate == 0 {
			fixed = append(fixed, xy)
		} else {
			scaled = append(scaled, xy)
		}
	}
	if err := addLine(p, "fixed number of ready machines", blue, fixed); err != nil {
		return err
	}
	if err := addPoints(p, "", blue, draw.CircleGlyph{}, fixed); err != nil {
		return err
	}
	if err := addPoints(p, "scales itself", orange, draw.TriangleGlyph{}, scaled); err != nil {
		return err
	}
	if err := addPoints(p, "recommended", red, draw.RingGlyph{}, plotter.XYs{at(r.Policy)}); err != nil {
		return err
	}
	p.Y.Min = 0
	return write(w, p)
}

func at(p simulate.Point) plotter.XY { return plotter.XY{X: p.MemoryHours, Y: p.MissRate * 100} }

func newPlot(title, x, y string) *plot.Plot {
	p := plot.New()
	p.Title.Text, p.X.Label.Text, p.Y.Label.Text = title, x, y
	p.Legend.Top = true
	p.BackgroundColor = color.White
	for _, style := range []*text.Style{
		&p.Title.TextStyle, &p.X.Label.TextStyle, &p.Y.Label.TextStyle, &p.X.Tick.Label, &p.Y.Tick.Label, &p.Legend.TextStyle,
	} {
		style.Font.Variant = "Sans"
	}
	grid := plotter.NewGrid()
	grid.Horizontal.Color, grid.Vertical.Color = color.Gray{0xe0}, color.Gray{0xe0}
	p.Add(grid)
	return p
}

func addLine(p *plot.Plot, name string, c color.Color, points plotter.XYs) error {
	if len(points) == 0 {
		return nil
	}
	line, err := plotter.NewLine(points)
	if err != nil {
		return fmt.Errorf("plot %s: %w", name, err)
	}
	line.Color, line.Width = c, vg.Points(1.5)
	p.Add(line)
	p.Legend.Add(name, line)
	return nil
}

func addPoints(p *plot.Plot, name string, c color.Color, shape draw.GlyphDrawer, points plotter.XYs) error {
	if len(points) == 0 {
		return nil
	}
	scatter, err := plotter.NewScatter(points)
	if err != nil {
		return fmt.Errorf("plot %s: %w", name, err)
	}
	scatter.GlyphStyle = draw.GlyphStyle{Color: c, Radius: vg.Points(3), Shape: shape}
	if _, ring := shape.(draw.RingGlyph); ring {
		scatter.Radius = vg.Points(7)
	}
	p.Add(scatter)
	if name != "" {
		p.Legend.Add(name, scatter)
	}
	return nil
}

func write(w io.Writer, p *plot.Plot) error {
	// A flat line at 0 has no range: an axis needs one.
	if !(p.Y.Max > p.Y.Min) || math.IsInf(p.Y.Max, 0) {
		p.Y.Max = p.Y.Min + 1
	}
	if !(p.X.Max > p.X.Min) || math.IsInf(p.X.Max, 0) {
		p.X.Min, p.X.Max = 0, 1
	}
	c := vgsvg.New(width, height)
	p.Draw(draw.New(c))
	if _, err := c.WriteTo(w); err != nil {
		return fmt.Errorf("write a plot: %w", err)
	}
	return nil
}
