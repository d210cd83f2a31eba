package run

import (
	"context"
	"fmt"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/ephemeral-run/ephemeral/run/redisserver/redistest"
)

// startCluster starts a Redis Cluster of three nodes and returns the address of one.
func startCluster(t *testing.T) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	var nodes []*redis.Client
	var ports []int
	for range 3 {
		port := redistest.FreePort(t)
		cmd := exec.Command("redis-server", "--port", fmt.Sprint(port), "--bind", "127.0.0.1", "--cluster-enabled", "yes",
			"--dir", t.TempDir(), "--save", "", "--appendonly", "no")
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			cmd.Process.Kill()
			cmd.Wait()
		})
		c := redis.NewClient(&redis.Options{Addr: fmt.Sprintf("127.0.0.1:%d", port), MaxRetries: 50, DisableIdentity: true})
		t.Cleanup(func() { c.Close() })
		nodes, ports = append(nodes, c), append(ports, port)
	}
	for i, c := range nodes {
		low, high := i*16384/3, (i+1)*16384/3-1
		for c.Ping(ctx).Err() != nil && ctx.Err() == nil {
			time.Sleep(20 * time.Millisecond)
		}
		if err := c.ClusterAddSlotsRange(ctx, low, high).Err(); err != nil {
			t.Fatal(err)
		}
		if err := c.ClusterMeet(ctx, "127.0.0.1", fmt.Sprint(ports[0])).Err(); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range nodes {
		for !strings.Contains(c.ClusterInfo(ctx).Val(), "cluster_state:ok") {
			if ctx.Err() != nil {
				t.Fatal("the cluster does not form")
			}
			time.Sleep(50 * time.Millisecond)
		}
	}
	return fmt.Sprintf("127.0.0.1:%d", ports[0])
}

// Every key of a cell is in one slot, and every script finds its keys there.
func TestRedisCluster(t *testing.T) {
	addr := startCluster(t)
	for _, cell := range []string{"c0", "c1", "c2", "east-4"} {
		f := newFixture(t, func(c *Config) { c.RedisURL, c.Cell = "redis+cluster://"+addr, cell })
		events, _, err := f.Subscribe(f.ctx, nil)
		f.must(err)
		f.newOrg("o", 0, 10_000)
		_, secret, err := f.CreateKey(f.ctx, "o", "k", Member)
		f.must(err)
		_, err = f.Authenticate(f.ctx, secret)
		f.must(err)
		for _, zdr := range []bool{false, true} {
			f.must(f.oneRun("c" + flag(zdr)))
			f.withCanary("text"+flag(zdr), zdr)
		}
		id := f.admit("o", 100).ID
		l := f.take()
		f.must(f.Requeue(f.ctx, l))
		f.take()
		_, _, err = f.Reap(f.ctx, "n1")
		f.must(err)
		_, err = f.Cancel(f.ctx, "o", id)
		f.must(err)
		f.must(f.Delete(f.ctx, "o", id))
		runs, _, err := f.List(f.ctx, "o", Page{})
		f.must(err)
		f.same(len(runs), 5)
		f.balanced()
		select {
		case e := <-events:
			f.same(e.Type, EventQueued)
		case <-time.After(5 * time.Second):
			t.Fatal("no event")
		}
	}
}

// WAIT goes to the node that has the cell, whose replicas count: here there are none.
func TestRedisClusterWithoutReplicas(t *testing.T) {
	f := newFixture(t, func(c *Config) { c.RedisURL, c.Replicas = "redis+cluster://"+startCluster(t), 1 })
	for _, org := range []string{"o", "o"} {
		_, err := f.CreateOrg(f.ctx, Org{ID: org})
		f.want(err, ErrUnavailable)
		if !strings.Contains(err.Error(), "0 of 1 replicas") {
			t.Fatal(err)
		}
	}
	o, err := f.Org(f.ctx, "o")
	f.must(err)
	f.same(o.ID, "o")
}
