// Command upstreams is an example: a billing API and a PostgreSQL database with sample data, both to be read only, for the
// example requests that use connections. "make serve" starts it beside the server and it ends with the server.
//
// Both listen on an address of loopback that nothing else uses, so that EPHEMERAL_CONNECTION_ALLOW opens the way to them alone.
package main

import (
	"context"
	"crypto/rand"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
)

// address is where the upstreams listen.
const address = "127.77.0.1"

// patience is how long the server may take to start, its first image and template included.
const patience = 10 * time.Minute

func main() {
	ephemeral := flag.String("ephemeral", "build/ephemeral", "the program that configures the connections")
	org := flag.String("org", "org_default", "organisation whose connections they become")
	dir := flag.String("dir", "", "directory of the database, which is made anew at each start")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	signal.Ignore(os.Interrupt) // the server may still have runs to end; this ends with it
	if err := errors.Join(endWithParent(stop), run(ctx, *ephemeral, *org, *dir)); err != nil {
		slog.Error("example upstreams", "error", err)
		os.Exit(1)
	}
}

// endWithParent has the system send SIGTERM when the program that started this one ends.
func endWithParent(stop func()) error {
	parent := os.Getppid()
	if err := unix.Prctl(unix.PR_SET_PDEATHSIG, uintptr(syscall.SIGTERM), 0, 0, 0); err != nil {
		return fmt.Errorf("end with the server: %w", err)
	}
	if os.Getppid() != parent { // it has ended meanwhile
		stop()
	}
	return nil
}

// run serves the upstreams until ctx ends, and configures the connections to them.
func run(ctx context.Context, ephemeral, org, dir string) error {
	if dir == "" {
		return errors.New("-dir is missing")
	}
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	group, ctx := errgroup.WithContext(ctx)
	listener, err := net.Listen("tcp", address+":0")
	if err != nil {
		return fmt.Errorf("listen for the billing API: %w", err)
	}
	token := rand.Text()
	group.Go(func() error { return serveBilling(ctx, listener, token) })
	connections := []definition{{"billing", token, []string{
		"--base-url", "http://" + listener.Addr().String(), "--auth", "bearer", "--path", "/customers", "--path", "/invoices", "--path", "/invoices/*",
		"--description", "Example: invoices and customers of a shop, read only. GET /invoices?status=open|paid, /invoices/ID, /customers",
	}}}
	db, err := startDatabase(ctx, dir)
	switch {
	case errors.Is(err, errNoPostgres):
		slog.Warn("the example database is left out", "reason", err)
	case err != nil:
		stop()
		return errors.Join(err, group.Wait())
	default:
		group.Go(func() error { return db.wait(ctx) })
		connections = append(connections, definition{"warehouse", db.password, []string{
			"--kind", "postgres", "--base-url", fmt.Sprintf("postgres://reader@%s:%s/shop?sslmode=disable", address, db.port), "--auth", "basic",
			"--description", "Example: products and orders of a shop, read only.",
		}})
	}
	group.Go(func() error {
		for _, c := range connections {
			if err := c.put(ctx, ephemeral, org); err != nil {
				if ctx.Err() != nil {
					return nil
				}
				return err
			}
			slog.Info("example connection configured", "org", org, "connection", c.name)
		}
		return nil
	})
	return group.Wait()
}

// definition is a connection as "ephemeral connections put" takes it.
type definition struct {
	name, credential string
	flags            []string
}

// put configures the connection, as soon as there is a server with the organisation.
func (d definition) put(ctx context.Context, ephemeral, org string) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		cmd := exec.CommandContext(ctx, ephemeral, append([]string{"connections", "put", org, d.name, "--credential-file", "-"}, d.flags...)...)
		cmd.Stdin = strings.NewReader(d.credential)
		out, err := cmd.CombinedOutput()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("configure connection %s: %w: %s", d.name, err, strings.TrimSpace(string(out)))
		case <-time.After(time.Second):
		}
	}
}
