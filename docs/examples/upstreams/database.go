package main

import (
	"context"
	"crypto/rand"
	_ "embed"
	"errors"
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
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

// sample is the content of the database shop.
//
//go:embed shop.sql
var sample string

var errNoPostgres = errors.New("PostgreSQL is not installed")

// databaseStart is how long the database may take to answer.
const databaseStart = time.Minute

// database is a private PostgreSQL with the database shop, and the role reader, who may read it and nothing else.
type database struct {
	port, password string
	server         *exec.Cmd
	owner          string // password
}

// startDatabase makes a cluster in dir, in the place of the one of an earlier start, and fills it.
func startDatabase(ctx context.Context, dir string) (*database, error) {
	all, err := filepath.Glob("/usr/lib/postgresql/*/bin/postgres")
	if err != nil || len(all) == 0 {
		return nil, errNoPostgres
	}
	slices.Sort(all)
	bin := filepath.Dir(all[len(all)-1])
	if err := errors.Join(os.RemoveAll(dir), os.MkdirAll(dir, 0o755)); err != nil {
		return nil, fmt.Errorf("directory of the example database: %w", err)
	}
	attr, err := unprivileged(dir)
	if err != nil {
		return nil, err
	}
	db := &database{password: rand.Text(), owner: rand.Text()}
	secret, data := filepath.Join(dir, "password"), filepath.Join(dir, "data")
	if err := os.WriteFile(secret, []byte(db.owner+"\n"), 0o600); err != nil {
		return nil, fmt.Errorf("example database: %w", err)
	}
	if c := attr.Credential; c != nil {
		if err := os.Chown(secret, int(c.Uid), int(c.Gid)); err != nil {
			return nil, fmt.Errorf("example database: %w", err)
		}
	}
	initdb := exec.CommandContext(ctx, filepath.Join(bin, "initdb"), "-D", data, "-U", "owner", "--pwfile", secret, "-A", "scram-sha-256", "--no-sync", "-E", "UTF8", "--locale", "C")
	initdb.Dir, initdb.SysProcAttr = dir, attr
	if out, err := initdb.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("make the example database: %w: %s", err, out)
	}
	if err := os.Remove(secret); err != nil {
		return nil, fmt.Errorf("example database: %w", err)
	}
	if db.port, err = freePort(); err != nil {
		return nil, err
	}
	db.server = exec.Command(filepath.Join(bin, "postgres"), "-D", data, "-p", db.port, "-c", "listen_addresses="+address, "-c", "unix_socket_directories=",
		"-c", "fsync=off", "-c", "shared_buffers=16MB", "-c", "max_connections=20", "-c", "log_min_messages=fatal")
	db.server.Dir, db.server.SysProcAttr, db.server.Stderr = dir, attr, os.Stderr
	if err := db.server.Start(); err != nil {
		return nil, fmt.Errorf("start the example database: %w", err)
	}
	if err := db.fill(ctx); err != nil {
		return nil, errors.Join(err, db.stop())
	}
	return db, nil
}

// unprivileged is how PostgreSQL is started: it refuses to run as root, so then it runs as nobody, who gets dir. It ends
// with this program, and does not hear the terminal's Ctrl-C.
func unprivileged(dir string) (*syscall.SysProcAttr, error) {
	attr := &syscall.SysProcAttr{Pdeathsig: syscall.SIGQUIT, Setpgid: true}
	if os.Getuid() != 0 {
		return attr, nil
	}
	nobody, err := user.Lookup("nobody")
	if err != nil {
		return nil, fmt.Errorf("user of the example database: %w", err)
	}
	uid, err1 := strconv.ParseUint(nobody.Uid, 10, 32)
	gid, err2 := strconv.ParseUint(nobody.Gid, 10, 32)
	if err := errors.Join(err1, err2, os.Chown(dir, int(uid), int(gid))); err != nil {
		return nil, fmt.Errorf("user of the example database: %w", err)
	}
	attr.Credential = &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}
	return attr, nil
}

// freePort is a port that nobody listens on now.
func freePort() (string, error) {
	l, err := net.Listen("tcp", address+":0")
	if err != nil {
		return "", fmt.Errorf("port of the example database: %w", err)
	}
	_, port, err := net.SplitHostPort(l.Addr().String())
	return port, errors.Join(err, l.Close())
}

// fill makes the role and the sample data.
func (db *database) fill(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, databaseStart)
	defer cancel()
	exec := func(name string, statements ...string) error {
		for {
			conn, err := pgconn.Connect(ctx, fmt.Sprintf("host=%s port=%s user=owner password=%s dbname=%s sslmode=disable", address, db.port, db.owner, name))
			if err == nil {
				defer conn.Close(context.WithoutCancel(ctx))
				for _, s := range statements {
					if _, err := conn.Exec(ctx, s).ReadAll(); err != nil {
						return fmt.Errorf("fill the example database: %w", err)
					}
				}
				return nil
			}
			select {
			case <-ctx.Done():
				return fmt.Errorf("the example database does not answer: %w", err)
			case <-time.After(50 * time.Millisecond):
			}
		}
	}
	if err := exec("postgres", "CREATE ROLE reader LOGIN PASSWORD '"+db.password+"' CONNECTION LIMIT 10", "CREATE DATABASE shop"); err != nil {
		return err
	}
	return exec("shop", strings.TrimSpace(sample))
}

// wait ends with the database, which it stops when ctx ends.
func (db *database) wait(ctx context.Context) error {
	stop := context.AfterFunc(ctx, func() { _ = db.server.Process.Signal(syscall.SIGINT) }) // fast: without waiting for clients
	defer stop()
	if err := db.server.Wait(); ctx.Err() == nil {
		return fmt.Errorf("the example database has ended: %w", err)
	}
	return nil
}

func (db *database) stop() error {
	err := db.server.Process.Signal(syscall.SIGQUIT)
	_ = db.server.Wait() // it was told to end
	return err
}
