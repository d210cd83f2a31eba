// Command probe draws from the sources of randomness of a Go program, and prints what it drew, a line for each: "value", a tab,
// its name, a tab and the value. It is built static and carried into machines.
package main

import (
	"crypto/ecdh"
	"crypto/rand"
	"encoding/hex"
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
	file, err := os.CreateTemp("", "clone-*")
	if err == nil {
		err = os.Remove(file.Name())
	}
	if err != nil {
		fail(err)
	}
	value("Go crypto/rand", hex.EncodeToString(secret))
	value("Go crypto/ecdh", hex.EncodeToString(key.PublicKey().Bytes()))
	value("Go math/rand/v2", mrand.Uint64(), mrand.Uint64())
	value("Go maphash", maphash.String(maphash.MakeSeed(), "x"))
	value("Go temporary name", file.Name())
}

func value(name string, is ...any) { fmt.Printf("value\t%s\t%s\n", name, fmt.Sprint(is...)) }

func fail(err error) {
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}
