package redisserver

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
)

// ErrNotRunning says that no redis-server runs for the directory.
var ErrNotRunning = errors.New("no private redis-server is running")

// pointer is the file in the server's directory that holds the path of its socket, which may lie elsewhere.
const pointer = "socket"

// publish writes where the socket is, for Find.
func publish(dir, socket string) error {
	if err := os.WriteFile(filepath.Join(dir, pointer), []byte(socket+"\n"), 0o600); err != nil {
		return fmt.Errorf("publish the redis socket: %w", err)
	}
	return nil
}

// Find returns the URL of the server that another process runs for dir. ErrNotRunning: there is none.
func Find(dir string) (string, error) {
	b, err := os.ReadFile(filepath.Join(dir, pointer))
	if errors.Is(err, fs.ErrNotExist) {
		return "", fmt.Errorf("%w in %s", ErrNotRunning, dir)
	}
	if err != nil {
		return "", fmt.Errorf("find the redis socket: %w", err)
	}
	socket := strings.TrimSpace(string(b))
	c, err := net.Dial("unix", socket)
	if err != nil {
		return "", fmt.Errorf("%w in %s: %w", ErrNotRunning, dir, err)
	}
	return "unix://" + socket, c.Close()
}
