package gateway

import (
	"fmt"
	"time"

	"github.com/ephemeral-run/ephemeral/run"
)

// UploadConfig is what a gateway takes as uploads.
type UploadConfig struct {
	Limit       int64         `env:"EPHEMERAL_UPLOAD_LIMIT" envDefault:"33554432" help:"largest upload in bytes (at most 268435456)"`
	Bytes       int64         `env:"EPHEMERAL_UPLOAD_BYTES" envDefault:"268435456" help:"bytes of uploads that an organisation may have at once; they are kept in Redis"`
	Count       int           `env:"EPHEMERAL_UPLOAD_COUNT" envDefault:"1000" help:"uploads that an organisation may have at once"`
	Life        time.Duration `env:"EPHEMERAL_UPLOAD_LIFE" envDefault:"1h" help:"how long an upload can be used by new runs"`
	Timeout     time.Duration `env:"EPHEMERAL_UPLOAD_TIMEOUT" envDefault:"5m" help:"how long a client may take to send one upload; each 256 KiB of it within EPHEMERAL_READ_TIMEOUT"`
	Concurrency int           `env:"EPHEMERAL_UPLOAD_CONCURRENCY" envDefault:"64" help:"uploads that a gateway receives at once, with 256 KiB of memory each; further ones wait"`
	RunBytes    int64         `env:"EPHEMERAL_RUN_FILE_BYTES" envDefault:"67108864" help:"bytes of all files of one run, uploads and those in the request"`
}

// maxUploadLife bounds how long uploads may be kept.
const maxUploadLife = 30 * 24 * time.Hour

// check says what is wrong.
func (c UploadConfig) check() error {
	switch {
	case c.Limit < 1 || c.Limit > run.MaxUploadBytes:
		return fmt.Errorf("EPHEMERAL_UPLOAD_LIMIT %d: want 1 to %d", c.Limit, run.MaxUploadBytes)
	case c.Bytes < c.Limit:
		return fmt.Errorf("EPHEMERAL_UPLOAD_BYTES %d: want at least EPHEMERAL_UPLOAD_LIMIT, %d", c.Bytes, c.Limit)
	case c.Count < 1 || c.Count > run.MaxUploads:
		return fmt.Errorf("EPHEMERAL_UPLOAD_COUNT %d: want 1 to %d", c.Count, run.MaxUploads)
	case c.Life < time.Second || c.Life > maxUploadLife:
		return fmt.Errorf("EPHEMERAL_UPLOAD_LIFE %v: want 1s to %v", c.Life, maxUploadLife)
	case c.Timeout < time.Second:
		return fmt.Errorf("EPHEMERAL_UPLOAD_TIMEOUT %v: want at least 1s", c.Timeout)
	case c.Concurrency < 1:
		return fmt.Errorf("EPHEMERAL_UPLOAD_CONCURRENCY %d: want a positive number", c.Concurrency)
	case c.RunBytes < maxFileBytes:
		return fmt.Errorf("EPHEMERAL_RUN_FILE_BYTES %d: want at least %d, which the files in a request may have", c.RunBytes, maxFileBytes)
	}
	return nil
}

// besides is how many bytes a run's uploads may have beside the files in its request.
func (c UploadConfig) besides(files []run.File) int64 {
	most, uploads := c.RunBytes, false
	for _, f := range files {
		uploads = uploads || f.Upload != ""
	}
	if !uploads {
		return 0
	}
	for _, f := range files {
		n, _ := decodedSize(f) // it was checked
		most -= int64(n)
	}
	return most
}
