// Command probe draws from the sources of randomness of a Go program, and prints what it drew as a JSON object. It is built
// static and carried into machines.
package main

import (
	"crypto/ecdh"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"hash/maphash"
	mrand "math/rand/v2"
	"os"
)

func main() {
	secret := make([]byte, 32)
	if _, err := rand.Read(secret); err != nil {
		fail(err)
	}
	key, err := ecdh.X25519().GenerateKey(rand.Reader)
	if err != nil {
		fail(err)
	}
	err = json.NewEncoder(os.Stdout).Encode(map[string]string{
		"Go crypto/rand":  hex.EncodeToString(secret),
		"Go crypto/ecdh":  hex.EncodeToString(key.PublicKey().Bytes()),
		"Go math/rand/v2": fmt.Sprint(mrand.Uint64(), mrand.Uint64()),
		"Go maphash":      fmt.Sprint(maphash.String(maphash.MakeSeed(), "x")),
	})
	if err != nil {
		fail(err)
	}
}

func fail(err error) {
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}
