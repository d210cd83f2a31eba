package client

import (
	"context"
	"crypto/rand"
	"net/http"

	"github.com/ephemeral-run/ephemeral/run"
)

// SignupTerms say whether people can make an organisation by themselves, and with what.
type SignupTerms struct {
	Open   bool       `json:"open"`
	Credit run.Micros `json:"credit_micros"`
}

// Account is what a sign-up made; the key's secret is shown this once.
type Account struct {
	Org     run.Org     `json:"org"`
	Key     NewKey      `json:"key"`
	Account run.Account `json:"account"`
}

// SignupTerms asks whether people can sign up. It needs no key.
func (c *Client) SignupTerms(ctx context.Context) (SignupTerms, error) {
	var t SignupTerms
	err := c.call(ctx, request{method: http.MethodGet, path: "/v1/signup", repeat: true}, &t)
	return t, err
}

// SignUp makes an organisation of that name with trial credit, and its first key. It needs no key. Each call is a
// sign-up; where its answer is lost, the call fails with a *Problem "already_signed_up": the account is there, its secret is not.
func (c *Client) SignUp(ctx context.Context, name string) (Account, error) {
	body, err := encode(struct {
		Name string `json:"name"`
	}{name})
	if err != nil {
		return Account{}, err
	}
	var a Account
	err = c.call(ctx, request{method: http.MethodPost, path: "/v1/signup", body: body, repeat: true,
		header: map[string]string{"Idempotency-Key": quote(rand.Text())}}, &a)
	return a, err
}
