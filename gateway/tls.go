package gateway

import (
	"crypto/tls"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"time"
)

// certificateCheck is how often, at most, the files are looked at; a renewed certificate is served that soon.
const certificateCheck = time.Second

// certificate serves the certificate in two PEM files, and the new one when they change.
type certificate struct {
	certFile, keyFile string
	log               *slog.Logger

	mu      sync.Mutex
	current *tls.Certificate
	version [2]time.Time // modification times of what is served
	checked time.Time
}

// openCertificate reads the files.
func openCertificate(certFile, keyFile string, log *slog.Logger) (*certificate, error) {
	c := &certificate{certFile: certFile, keyFile: keyFile, log: log}
	if err := c.load(); err != nil {
		return nil, err
	}
	return c, nil
}

// load reads both files and serves them from now on.
func (c *certificate) load() error {
	version, err := c.stat()
	if err != nil {
		return err
	}
	pair, err := tls.LoadX509KeyPair(c.certFile, c.keyFile)
	if err != nil {
		return fmt.Errorf("certificate %s and key %s (EPHEMERAL_TLS_CERT, EPHEMERAL_TLS_KEY): %w", c.certFile, c.keyFile, err)
	}
	c.current, c.version = &pair, version
	return nil
}

func (c *certificate) stat() (version [2]time.Time, err error) {
	for i, name := range []string{c.certFile, c.keyFile} {
		info, err := os.Stat(name)
		if err != nil {
			return version, fmt.Errorf("certificate (EPHEMERAL_TLS_CERT, EPHEMERAL_TLS_KEY): %w", err)
		}
		version[i] = info.ModTime()
	}
	return version, nil
}

// get returns the certificate for a handshake. Files that cannot be used leave the one before in use.
func (c *certificate) get(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if now := time.Now(); now.Sub(c.checked) >= certificateCheck {
		c.checked = now
		version, err := c.stat()
		if err == nil && version != c.version {
			if err = c.load(); err == nil {
				c.log.Info("serving a new certificate", "file", c.certFile)
			}
		}
		if err != nil {
			c.log.Error("the changed certificate cannot be used, serving the one before", "error", err)
		}
	}
	return c.current, nil
}

// config is for a listener that speaks HTTP/1.1 over TLS 1.2 or newer.
func (c *certificate) config() *tls.Config {
	return &tls.Config{GetCertificate: c.get, MinVersion: tls.VersionTLS12, NextProtos: []string{"http/1.1"}}
}
