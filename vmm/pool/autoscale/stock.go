package autoscale

import "math"

// ErlangB is the probability that all of c servers are busy in a system without a queue (M/G/c/c) under an offered load in
// Erlang, by the usual recursion.
func ErlangB(c int, load float64) float64 {
	b := 1.0
	for i := 1; i <= c; i++ {
		b = load * b / (float64(i) + load*b)
	}
	return b
}

// ErlangC is the probability that a customer of an M/M/c queue has to wait, for a load below c Erlang; from there on it
// is 1.
func ErlangC(c int, load float64) float64 {
	servers := float64(c)
	if load >= servers {
		return 1
	}
	b := ErlangB(c, load)
	return b / (1 - load/servers*(1-b))
}

// normalMean is the mean from which a normal distribution serves as well as a discrete one, and does not underflow.
const normalMean = 300

// stock is the smallest n such that a number with this mean and variance is n or more with probability at most miss.
func stock(mean, variance, miss float64) int {
	if mean <= 0 {
		return 0
	}
	if mean > normalMean {
		z := math.Sqrt2 * math.Erfinv(1-2*miss)
		return int(math.Ceil(mean + z*math.Sqrt(max(variance, mean))))
	}
	p, next := poisson(mean)
	if variance > mean*1.001 {
		p, next = negativeBinomial(mean, variance)
	}
	n, above := 0, 1.0 // above: probability of n or more
	for above > miss && n < mostStock {
		above -= p
		n++
		p *= next(n)
	}
	return n
}

// mostStock bounds the search for heavy tails.
const mostStock = 10000

// poisson gives P(0) and the ratio of P(n) to P(n-1).
func poisson(mean float64) (zero float64, next func(n int) float64) {
	return math.Exp(-mean), func(n int) float64 { return mean / float64(n) }
}

// negativeBinomial is the same for a variance above the mean.
func negativeBinomial(mean, variance float64) (zero float64, next func(n int) float64) {
	r := mean * mean / (variance - mean)
	q := mean / (mean + r)
	return math.Pow(1-q, r), func(n int) float64 { return q * (r + float64(n) - 1) / float64(n) }
}
