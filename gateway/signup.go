package gateway

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"strings"

	"github.com/gofiber/fiber/v2"

	"github.com/ephemeral-run/ephemeral/run"
)

// SignupConfig says whether people may make organisations by themselves, and what they get.
type SignupConfig struct {
	Open        bool   `env:"EPHEMERAL_SIGNUP" envDefault:"false" help:"lets anybody create an organisation with trial credit and a member key"`
	Credit      int64  `env:"EPHEMERAL_SIGNUP_CREDIT" envDefault:"250000" help:"trial credit of each, in micro-dollars"`
	Pot         int64  `env:"EPHEMERAL_SIGNUP_POT" envDefault:"10000000" help:"trial credit of all together, ever, in micro-dollars; never more is given"`
	PerDay      int    `env:"EPHEMERAL_SIGNUP_PER_DAY" envDefault:"3" help:"sign-ups a day of one address (of IPv6, of its first 64 bits)"`
	Concurrency int    `env:"EPHEMERAL_SIGNUP_CONCURRENCY" envDefault:"2" help:"runs at once of such an organisation"`
	Header      string `env:"EPHEMERAL_SIGNUP_ADDRESS_HEADER" help:"header whose last address is the client's, set by a proxy in front, e.g. X-Forwarded-For (empty: the connection's address)"`
}

// check says what is wrong.
func (c SignupConfig) check() error {
	switch {
	case c.Credit < 1 || c.Credit > maxCredit:
		return fmt.Errorf("EPHEMERAL_SIGNUP_CREDIT %d: want 1 to %d micro-dollars", c.Credit, int64(maxCredit))
	case c.Pot < 1 || c.Pot > maxCredit:
		return fmt.Errorf("EPHEMERAL_SIGNUP_POT %d: want 1 to %d micro-dollars", c.Pot, int64(maxCredit))
	case c.PerDay < 1 || c.PerDay > maxSignupsPerDay:
		return fmt.Errorf("EPHEMERAL_SIGNUP_PER_DAY %d: want 1 to %d", c.PerDay, maxSignupsPerDay)
	case c.Concurrency < 1 || c.Concurrency > maxConcurrency:
		return fmt.Errorf("EPHEMERAL_SIGNUP_CONCURRENCY %d: want 1 to %d", c.Concurrency, maxConcurrency)
	}
	return nil
}

// maxSignupsPerDay bounds what one address may be allowed.
const maxSignupsPerDay = 100_000

// signupTerms is the body of GET /v1/signup.
type signupTerms struct {
	Open   bool       `json:"open"`          // whether one more can sign up
	Credit run.Micros `json:"credit_micros"` // what each gets; 0 where nobody can
}

// account is the body of POST /v1/signup's answer, the only one that has the secret.
type account struct {
	Org     run.Org     `json:"org"`
	Key     newKey      `json:"key"`
	Account run.Account `json:"account"`
}

// getSignup answers GET /v1/signup, without a key: whether people may sign up.
func (s *Server) getSignup(c *fiber.Ctx) error {
	terms := signupTerms{}
	if s.cfg.Signup.Open {
		ctx := s.deadline()
		given, err := s.deps.Store.TrialGiven(ctx)
		if err != nil {
			return err
		}
		if credit := run.Micros(s.cfg.Signup.Credit); given+credit <= run.Micros(s.cfg.Signup.Pot) {
			terms = signupTerms{true, credit}
		}
	}
	return sendJSON(c, http.StatusOK, terms)
}

// signUp answers POST /v1/signup, without a key: an organisation with trial credit, and its first key. Repeated with its
// idempotency key it makes no second one, and cannot show the key again: of its secret only the SHA-256 is kept.
func (s *Server) signUp(c *fiber.Ctx) error {
	cfg := s.cfg.Signup
	if !cfg.Open {
		return problem(CodeSignupClosed, "")
	}
	ctx := s.deadline()
	from, err := clientAddress(c, cfg.Header)
	if err != nil {
		return err
	}
	idempotency, err := idempotencyKey(headerValues(c, headerIdempotencyKey))
	if err != nil {
		return err
	}
	name, err := s.readName(ctx, c)
	if err != nil {
		return err
	}
	name = strings.TrimSpace(name)
	org, key, secret, err := s.deps.Store.SignUp(ctx, name, from, idempotency, run.Trial{
		Credit: run.Micros(cfg.Credit), Pot: run.Micros(cfg.Pot), Concurrency: cfg.Concurrency, PerDay: cfg.PerDay,
	})
	var limit *run.SignUpLimitError
	switch {
	case errors.As(err, &limit):
		return problem(CodeTooManySignups, "").after(limit.Wait)
	case errors.Is(err, run.ErrSignedUp):
		return problem(CodeAlreadySignedUp, "")
	case errors.Is(err, run.ErrTrialExhausted):
		return problem(CodeTrialExhausted, "")
	case err != nil:
		return err
	}
	s.log.Info("somebody signed up", "org", org.ID, "request_id", requestID(c))
	credit := run.Micros(cfg.Credit)
	return sendJSON(c, http.StatusCreated, account{org, newKey{key, secret}, run.Account{Org: org.ID, Balance: credit, Available: credit, Deposits: credit}})
}

// clientAddress is where the request comes from: by the header that the operator's proxy sets, or else the connection. A
// proxy appends the address that it sees, so only the last one is not the client's own claim.
func clientAddress(c *fiber.Ctx, header string) (netip.Addr, error) {
	text := ""
	if header != "" {
		if values := headerValues(c, header); len(values) > 0 {
			last := values[len(values)-1]
			text = strings.TrimSpace(last[strings.LastIndexByte(last, ',')+1:])
		}
	} else if host, _, err := net.SplitHostPort(c.Context().RemoteAddr().String()); err == nil {
		text = host
	}
	a, err := netip.ParseAddr(text)
	if err != nil {
		return netip.Addr{}, problem(CodeInternal, "").because(fmt.Errorf("the client's address %.64q (EPHEMERAL_SIGNUP_ADDRESS_HEADER %q): %w", text, header, err))
	}
	return a, nil
}
