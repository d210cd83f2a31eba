package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/ephemeral-run/ephemeral/broker/secret"
	"github.com/ephemeral-run/ephemeral/run"
	"github.com/ephemeral-run/ephemeral/run/connection"
	"github.com/ephemeral-run/ephemeral/run/receipt"
)

// keyConfig is about the keys that seal credentials and sign receipts.
type keyConfig struct {
	SealingKey     secret.Value `env:"EPHEMERAL_SEALING_KEY" secret:"true" help:"keys that seal the credentials of connections: base64 of 32 bytes each, the newest first, separated by commas"`
	SealingKeyFile string       `env:"EPHEMERAL_SEALING_KEY_FILE" help:"file of such keys, one a line, instead (empty: sealing.key in the data directory; serve makes it)"`
	ReceiptKey     secret.Value `env:"EPHEMERAL_RECEIPT_KEY" secret:"true" help:"key that signs receipts: base64 of 32 bytes"`
	ReceiptKeyFile string       `env:"EPHEMERAL_RECEIPT_KEY_FILE" help:"file of that key instead (empty: receipt.key in the data directory; nodes make it)"`
}

// keyring are the keys that seal credentials; nil without an error: there are none. create makes the file that is not
// there, unless it was named.
func (s settings) keyring(create bool) (*connection.Keyring, error) {
	if s.Keys.SealingKey != "" {
		ring, err := connection.NewKeyring(string(s.Keys.SealingKey))
		if err != nil {
			return nil, fmt.Errorf("EPHEMERAL_SEALING_KEY: %w", err)
		}
		return ring, nil
	}
	if s.Keys.SealingKeyFile != "" {
		return connection.ReadKeyring(s.Keys.SealingKeyFile)
	}
	path := filepath.Join(s.Provision.DataDir, "sealing.key")
	if create {
		if err := makeKeyFile(path, connection.NewKey()); err != nil {
			return nil, fmt.Errorf("make the sealing key: %w", err)
		}
	}
	ring, err := connection.ReadKeyring(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return ring, err
}

// signer signs receipts. Its key is made when there is none.
func (s settings) signer() (*receipt.Signer, error) {
	if s.Keys.ReceiptKey != "" {
		signer, err := receipt.NewSigner(string(s.Keys.ReceiptKey))
		if err != nil {
			return nil, fmt.Errorf("EPHEMERAL_RECEIPT_KEY: %w", err)
		}
		return signer, nil
	}
	if s.Keys.ReceiptKeyFile != "" {
		return receipt.ReadSigner(s.Keys.ReceiptKeyFile)
	}
	path := filepath.Join(s.Provision.DataDir, "receipt.key")
	if err := makeKeyFile(path, receipt.NewSeed()); err != nil {
		return nil, fmt.Errorf("make the receipt key: %w", err)
	}
	return receipt.ReadSigner(path)
}

// makeKeyFile writes a file that only its owner may read, whole or not at all. One that is there stays as it is.
func makeKeyFile(path, key string) error {
	if _, err := os.Lstat(path); err == nil {
		return nil
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return fmt.Errorf("make the data directory: %w", err)
	}
	temp := path + "." + rand.Text()
	if err := os.WriteFile(temp, []byte(key+"\n"), 0o600); err != nil {
		return fmt.Errorf("write %s: %w", temp, err)
	}
	err := os.Link(temp, path)
	if errors.Is(err, fs.ErrExist) {
		err = nil // another process was first: its key counts
	}
	if err = errors.Join(err, os.Remove(temp)); err != nil {
		return fmt.Errorf("make %s: %w", path, err)
	}
	return nil
}

// keepSecrets takes the secrets out of the environment that programs started from here get, and keeps memory that holds
// them out of core dumps.
func keepSecrets() error {
	for _, v := range variables(reflect.TypeFor[settings]()) {
		if v.Secret {
			if err := os.Unsetenv(v.Name); err != nil {
				return fmt.Errorf("unset %s: %w", v.Name, err)
			}
		}
	}
	if err := unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{}); err != nil {
		return fmt.Errorf("forbid core dumps: %w", err)
	}
	// A handler of core dumps that the kernel pipes them to is not bound by the limit, but by this (prctl(2), core(5)).
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil && !errors.Is(err, syscall.EINVAL) {
		return fmt.Errorf("forbid core dumps: %w", err)
	}
	return nil
}

// prepareBroker gives the broker's configuration what it needs of the cell: connections, the keys of their credentials,
// and on a node the key of receipts, whose public half is published.
func (c *cell) prepareBroker(ctx context.Context, create, signs bool) (err error) {
	if c.sealing, err = c.keyring(create); err != nil {
		return err
	}
	c.Broker.Connections, c.Broker.Sealing = c.store, c.sealing
	if !signs {
		return nil
	}
	if c.Broker.Receipts, err = c.signer(); err != nil {
		return err
	}
	return publish(ctx, c.store, c.Broker.Receipts)
}

func publish(ctx context.Context, store *run.Store, s *receipt.Signer) error {
	return store.PutReceiptKey(ctx, s.ID(), s.Public())
}
