// Package postgrestest starts a private PostgreSQL for tests.
package postgrestest

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

// Cluster is a running PostgreSQL with the database shop, its owner owner, and the role reader, both with the password.
type Cluster struct {
	Port     string
	Password string
}

// binaries is where Debian keeps the newest PostgreSQL.
func binaries() string {
	all, err := filepath.Glob("/usr/lib/postgresql/*/bin/postgres")
	if err != nil || len(all) == 0 {
		return ""
	}
	slices.Sort(all)
	return filepath.Dir(all[len(all)-1])
}

// Start runs a cluster that ends with the test. PostgreSQL refuses to run as root: then it runs as nobody. Without
// PostgreSQL the test fails, and says what installs it.
func Start(t testing.TB, password string) *Cluster {
	t.Helper()
	bin := binaries()
	if bin == "" {
		t.Fatal("PostgreSQL is not installed: scripts/setup installs it")
	}
	dir, err := os.MkdirTemp("", "postgres")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	attr := unprivileged(t, dir)
	data, secret := filepath.Join(dir, "data"), filepath.Join(dir, "password")
	if err := os.WriteFile(secret, []byte(password+"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	c := &Cluster{Port: freePort(t), Password: password}
	run := func(name string, args ...string) {
		cmd := exec.Command(filepath.Join(bin, name), args...)
		cmd.SysProcAttr, cmd.Dir = attr, dir
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%s: %v\n%s", name, err, out)
		}
	}
	run("initdb", "-D", data, "-U", "owner", "--pwfile", secret, "-A", "scram-sha-256", "--no-sync", "-E", "UTF8", "--locale", "C")
	server := exec.Command(filepath.Join(bin, "postgres"), "-D", data, "-p", c.Port, "-k", dir, "-c", "listen_addresses=127.0.0.1", "-c", "fsync=off")
	server.SysProcAttr, server.Dir = attr, dir
	var log strings.Builder
	server.Stdout, server.Stderr = &log, &log
	if err := server.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = server.Process.Signal(syscall.SIGQUIT)
		_ = server.Wait()
		if t.Failed() {
			t.Logf("PostgreSQL's log:\n%s", log.String())
		}
	})
	c.await(t)
	c.Exec(t, "postgres", "CREATE DATABASE shop", "CREATE ROLE reader LOGIN PASSWORD '"+strings.ReplaceAll(password, "'", "''")+"'")
	return c
}

func unprivileged(t testing.TB, dir string) *syscall.SysProcAttr {
	attr := &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if os.Getuid() != 0 {
		return attr
	}
	nobody, err := user.Lookup("nobody")
	if err != nil {
		t.Fatal(err)
	}
	uid, _ := strconv.Atoi(nobody.Uid)
	gid, _ := strconv.Atoi(nobody.Gid)
	if err := os.Chown(dir, uid, gid); err != nil {
		t.Fatal(err)
	}
	attr.Credential = &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}
	return attr
}

func freePort(t testing.TB) string {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	_, port, _ := net.SplitHostPort(ln.Addr().String())
	return port
}

func (c *Cluster) url(database string) string {
	return fmt.Sprintf("host=127.0.0.1 port=%s user=owner dbname=%s sslmode=disable password='%s'", c.Port, database,
		strings.NewReplacer(`\`, `\\`, `'`, `\'`).Replace(c.Password))
}

func (c *Cluster) await(t testing.TB) {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	for {
		conn, err := pgconn.Connect(ctx, c.url("postgres"))
		if err == nil {
			conn.Close(ctx)
			return
		}
		select {
		case <-ctx.Done():
			t.Fatalf("PostgreSQL does not answer: %v", err)
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// Exec runs statements as the owner.
func (c *Cluster) Exec(t testing.TB, database string, statements ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	conn, err := pgconn.Connect(ctx, c.url(database))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(ctx)
	for _, s := range statements {
		if err := conn.Exec(ctx, s).Close(); err != nil {
			t.Fatalf("%s: %v", s, err)
		}
	}
}

// Value is the one value that a query of the owner gives.
func (c *Cluster) Value(t testing.TB, database, sql string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	conn, err := pgconn.Connect(ctx, c.url(database))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(ctx)
	r := conn.ExecParams(ctx, sql, nil, nil, nil, nil).Read()
	if r.Err != nil || len(r.Rows) != 1 {
		t.Fatalf("%s: %d rows, %v", sql, len(r.Rows), r.Err)
	}
	return string(r.Rows[0][0])
}
