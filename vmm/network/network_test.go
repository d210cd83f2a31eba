package network

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// TestRules asserts the whole rule set, as another program reads it from the kernel.
func TestRules(t *testing.T) {
	n := open(t, "t-"+randomHex(t))
	if err := n.Filtered(); err != nil {
		t.Fatal(err)
	}
	tap := newTap(t, n)
	own := `table inet ephemeral {
    chain input {
        type filter hook input priority filter; policy drop;
        counter packets 0 bytes 0 drop
    }
    chain forward {
        type filter hook forward priority filter; policy drop;
        counter packets 0 bytes 0 drop
    }
    chain output {
        type filter hook output priority filter; policy drop;
        counter packets 0 bytes 0 drop
    }
}
table netdev ephemeral {
`
	ingress := `    chain TAP {
        type filter hook ingress device "TAP" priority filter; policy drop;
        counter packets 0 bytes 0 drop
    }
`
	want := own + strings.ReplaceAll(ingress, "TAP", tap.Name) + "}\n"
	if diff := cmp.Diff(normal(want), normal(inside(t, n, "nft", "list", "ruleset"))); diff != "" {
		t.Errorf("with a tap (-want +got):\n%s", diff)
	}
	if err := tap.Close(); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(normal(own+"}\n"), normal(inside(t, n, "nft", "list", "ruleset"))); diff != "" {
		t.Errorf("without (-want +got):\n%s", diff)
	}
}

// TestNamespace looks at all there is in the namespace.
func TestNamespace(t *testing.T) {
	n := open(t, "t-"+randomHex(t))
	if names := inside(t, n, "ip", "netns"); !strings.Contains(names, n.Name()) {
		t.Errorf("ip netns lists %q, not %s", names, n.Name())
	}
	tap := newTap(t, n)
	if diff := cmp.Diff([]string{tap.Name}, n.Taps()); diff != "" {
		t.Errorf("taps (-want +got):\n%s", diff)
	}
	err := n.Do(func() error {
		links, err := Whole(netlink.LinkList)
		if err != nil {
			return err
		}
		if len(links) != 2 {
			t.Errorf("%d links", len(links))
		}
		for _, l := range links {
			checkLink(t, l, tap)
		}
		routes, err := Whole(func() ([]netlink.Route, error) { return netlink.RouteList(nil, netlink.FAMILY_ALL) })
		if err == nil && len(routes) != 0 {
			t.Errorf("routes %v", routes)
		}
		addresses, err2 := Whole(func() ([]netlink.Addr, error) { return netlink.AddrList(nil, netlink.FAMILY_ALL) })
		if err2 == nil && len(addresses) != 0 {
			t.Errorf("addresses %v", addresses)
		}
		return errors.Join(err, err2)
	})
	if err != nil {
		t.Fatal(err)
	}
	for key, want := range map[string]string{
		"net.ipv4.ip_forward": "0", "net.ipv4.conf.all.forwarding": "0", "net.ipv6.conf.all.forwarding": "0",
		"net.ipv6.conf.all.disable_ipv6": "1", "net.ipv6.conf.default.disable_ipv6": "1",
		"net.ipv6.conf.TAP.disable_ipv6": "1", "net.ipv6.conf.TAP.accept_ra": "0",
		"net.ipv6.conf.TAP.router_solicitations": "0", "net.ipv4.conf.TAP.forwarding": "0", "net.ipv4.conf.TAP.arp_ignore": "8",
	} {
		path := filepath.Join("/proc/sys", strings.ReplaceAll(strings.ReplaceAll(key, ".", "/"), "TAP", tap.Name))
		if got := strings.TrimSpace(inside(t, n, "cat", path)); got != want {
			t.Errorf("%s is %s, not %s", key, got, want)
		}
	}
}

func checkLink(t *testing.T, l netlink.Link, tap *Tap) {
	a := l.Attrs()
	if a.Name == "lo" {
		if a.Flags&net.FlagUp != 0 {
			t.Error("loopback is up")
		}
		return
	}
	tun, ok := l.(*netlink.Tuntap)
	if !ok || a.Name != tap.Name || a.RawFlags&unix.IFF_UP == 0 || a.RawFlags&unix.IFF_NOARP == 0 {
		t.Fatalf("link %s: %T, flags %x", a.Name, l, a.RawFlags)
	}
	if tun.Mode != netlink.TUNTAP_MODE_TAP || tun.NonPersist != true || tun.Owner != 20000 {
		t.Errorf("tap mode %v, not persistent %v, owner %d", tun.Mode, tun.NonPersist, tun.Owner)
	}
	flags := strings.TrimSpace(readSys(t, tap.Name, "tun_flags"))
	if want := fmt.Sprintf("0x%x", unix.IFF_TAP|unix.IFF_NO_PI|unix.IFF_VNET_HDR); flags != want {
		t.Errorf("tun_flags %s, not %s", flags, want)
	}
}

// readSys asks the kernel for the flags of a tap; /sys shows the namespace that it was mounted in, so by a new mount.
func readSys(t *testing.T, name, file string) string {
	t.Helper()
	out, err := exec.Command("unshare", "--mount", "sh", "-c", "mount -t sysfs none /sys && cat /sys/class/net/"+name+"/"+file).CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return string(out)
}

func TestNames(t *testing.T) {
	for _, node := range []string{"", "A", "../x", "a/b", "-a", strings.Repeat("a", 41)} {
		if n, err := Open(t.Context(), node); err == nil {
			t.Errorf("opened %q", node)
			_ = n.Close()
		}
	}
	n := open(t, "t-"+randomHex(t))
	for _, id := range []string{"", "0123456789a", "0123456789abc", "0123456789AB", "../../../../a"} {
		if tap, err := n.NewTap(id, 20000); err == nil {
			t.Errorf("made %s", tap.Name)
		}
	}
	if tap, err := n.NewTap("0123456789ab", 0); err == nil {
		t.Errorf("made %s for root", tap.Name)
	}
	if len(n.Taps()) != 0 {
		t.Errorf("taps %v", n.Taps())
	}
}

func TestMAC(t *testing.T) {
	for id, want := range map[string]string{
		"000000000000": "02:00:00:00:00:00", "ffffffffffff": "fe:ff:ff:ff:ff:ff", "0123456789ab": "02:23:45:67:89:ab",
	} {
		if got := guestMAC(id).String(); got != want {
			t.Errorf("%s: %s, not %s", id, got, want)
		}
	}
}

// TestTapTwice: one tap a machine; closing it twice is closing it once, and then it can be had again.
func TestTapTwice(t *testing.T) {
	n := open(t, "t-"+randomHex(t))
	id := randomHex(t)
	tap, err := n.NewTap(id, 20000)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := n.NewTap(id, 20000); !errors.Is(err, ErrExists) {
		t.Errorf("second tap: %v", err)
	}
	var wg sync.WaitGroup
	for range 3 {
		wg.Go(func() {
			if err := tap.Close(); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if _, _, err := tap.Counters(); err != nil {
		t.Errorf("counters after Close: %v", err)
	}
	again, err := n.NewTap(id, 20001)
	if err != nil {
		t.Fatal(err)
	}
	if err := tap.Close(); err != nil {
		t.Error(err)
	}
	if diff := cmp.Diff([]string{again.Name}, n.Taps()); diff != "" {
		t.Errorf("closing the old one touched the new one (-want +got):\n%s", diff)
	}
}

// TestTapGoneBefore: a tap that somebody deleted can be closed.
func TestTapGoneBefore(t *testing.T) {
	n := open(t, "t-"+randomHex(t))
	tap := newTap(t, n)
	inside(t, n, "ip", "link", "del", tap.Name)
	if _, _, err := tap.Counters(); err == nil {
		t.Error("counters of a tap that is not there")
	}
	if err := tap.Close(); err != nil {
		t.Error(err)
	}
}

// TestStaleTap: a tap of that name that is nobody's, with somebody still holding it open, makes room.
func TestStaleTap(t *testing.T) {
	n := open(t, "t-"+randomHex(t))
	var held []*os.File
	defer func() {
		for _, f := range held {
			_ = f.Close()
		}
	}()
	hold := func(name string) {
		t.Helper()
		err := n.Do(func() error {
			f, err := openTap(name, 20000)
			held = append(held, f)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	id := randomHex(t)
	hold(TapPrefix + id)
	tap, err := n.NewTap(id, 20000)
	if err != nil {
		t.Fatal(err)
	}
	hold("stale0")
	hold("stale1")
	stale, err := n.RemoveStale(t.Context())
	if want := (Stale{Taps: 2}); err != nil || stale != want {
		t.Errorf("removed %+v, %v, not %+v", stale, err, want)
	}
	if stale, err := n.RemoveStale(t.Context()); err != nil || stale != (Stale{}) {
		t.Errorf("the second time removed %+v, %v", stale, err)
	}
	if _, _, err := tap.Counters(); err != nil {
		t.Errorf("the tap in use is gone: %v", err)
	}
}

// TestInUse: one live process a namespace, also inside one process.
func TestInUse(t *testing.T) {
	n := open(t, "t-"+randomHex(t))
	node := strings.TrimPrefix(n.Name(), Prefix)
	if _, err := Open(t.Context(), node); !errors.Is(err, ErrInUse) {
		t.Errorf("opened again: %v", err)
	}
	newTap(t, n) // it still works
}

func TestCancelled(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	node := "t-" + randomHex(t)
	if _, err := Open(ctx, node); !errors.Is(err, context.Canceled) {
		t.Errorf("opened: %v", err)
	}
	n := open(t, node)
	if _, err := n.RemoveStale(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("RemoveStale: %v", err)
	}
}

// TestClose: Close takes the taps with it, and afterwards everything says ErrClosed.
func TestClose(t *testing.T) {
	n := open(t, "t-"+randomHex(t))
	tap := newTap(t, n)
	var wg sync.WaitGroup
	for range 3 {
		wg.Go(func() {
			if err := n.Close(); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if _, err := tap.File.Write([]byte("x")); !errors.Is(err, os.ErrClosed) {
		t.Errorf("tap after Close: %v", err)
	}
	if err := n.Do(func() error { return nil }); !errors.Is(err, ErrClosed) {
		t.Errorf("Do: %v", err)
	}
	if _, err := n.NewTap(randomHex(t), 20000); !errors.Is(err, ErrClosed) {
		t.Errorf("NewTap: %v", err)
	}
	if _, err := n.RemoveStale(t.Context()); !errors.Is(err, ErrClosed) {
		t.Errorf("RemoveStale: %v", err)
	}
}

// TestDo: all functions run on one thread, which lives in the namespace and is not the first of the process.
func TestDo(t *testing.T) {
	n := open(t, "t-"+randomHex(t))
	var mu sync.Mutex
	threads := map[int]bool{}
	spaces := map[string]bool{}
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			failure := errors.New("mine")
			err := n.Do(func() error {
				mu.Lock()
				defer mu.Unlock()
				threads[unix.Gettid()] = true
				space, err := os.Readlink("/proc/thread-self/ns/net")
				spaces[space] = true
				return errors.Join(err, failure)
			})
			if !errors.Is(err, failure) {
				t.Errorf("Do: %v", err)
			}
		})
	}
	wg.Wait()
	host, err := os.Readlink("/proc/self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	if len(threads) != 1 || threads[os.Getpid()] || len(spaces) != 1 || spaces[host] {
		t.Errorf("threads %v, namespaces %v, the host's is %s", threads, spaces, host)
	}
	// A child that asked for it dies with the thread.
	cmd := exec.Command("sleep", "1000")
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := n.Do(cmd.Start); err != nil {
		t.Fatal(err)
	}
	if err := n.Close(); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err == nil || cmd.ProcessState.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
		t.Errorf("child ended with %v", err)
	}
}

// TestWithoutIngress: where the kernel refuses the rule, taps are made without, and Filtered says why.
func TestWithoutIngress(t *testing.T) {
	n := open(t, "t-"+randomHex(t))
	n.filtered = errors.New("no such hook")
	tap := newTap(t, n)
	if rules := inside(t, n, "nft", "list", "ruleset"); strings.Contains(rules, tap.Name) {
		t.Errorf("rules %s", rules)
	}
	checkEgress(t, n, tap, newTap(t, n))
	if err := tap.Close(); err != nil {
		t.Error(err)
	}
}

// helper is a node with two taps that waits to be killed.
func helper(node string) {
	n, err := Open(context.Background(), node)
	if err == nil {
		_, err = n.NewTap("00000000000a", 20000)
	}
	if err == nil {
		_, err = n.NewTap("00000000000b", 20000)
	}
	fmt.Println(err)
	time.Sleep(time.Hour)
}

// TestNodeKilled: the taps end with their node; its namespace is adopted by its next life, and is as new.
func TestNodeKilled(t *testing.T) {
	for _, orphan := range []bool{false, true} {
		t.Run(fmt.Sprintf("orphan %v", orphan), func(t *testing.T) { killNode(t, orphan) })
	}
}

func killNode(t *testing.T, orphan bool) {
	node := "t-" + randomHex(t)
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), helperVariable+"="+node)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	kill := func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }
	defer kill()
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "<nil>\n" {
		t.Fatalf("helper says %q, %v", line, err)
	}
	want := Stale{Namespaces: 1}
	enter := func(args ...string) string {
		out, err := exec.Command("nsenter", append([]string{"--net=" + filepath.Join(directory, Prefix+node)}, args...)...).CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		return string(out)
	}
	if orphan { // what a crash should not leave, but might
		enter("ip", "tuntap", "add", "stale0", "mode", "tap")
		enter("ip", "link", "set", "lo", "up")
		enter("ip", "address", "add", "192.0.2.1/24", "dev", "lo")
		enter("nft", "add", "table", "ip", "stale")
		want.Taps = 1
	}
	kill()
	n := open(t, node)
	stale, err := n.RemoveStale(t.Context())
	if err != nil || stale != want {
		t.Errorf("removed %+v, %v, not %+v", stale, err, want)
	}
	links := normal(inside(t, n, "ip", "-brief", "link"))
	if len(links) != 1 || !slices.Contains(strings.Fields(links[0]), "DOWN") {
		t.Errorf("links %q", links)
	}
	if addresses := normal(inside(t, n, "ip", "-brief", "address")); len(addresses) != 1 || len(strings.Fields(addresses[0])) != 2 {
		t.Errorf("addresses %q", addresses)
	}
	if rules := inside(t, n, "nft", "list", "ruleset"); strings.Contains(rules, "stale") || strings.Contains(rules, "00000000000a") {
		t.Errorf("rules %s", rules)
	}
	newTap(t, n)
}

// TestHalfMadeName: what a crash leaves between making the name and binding the namespace to it.
func TestHalfMadeName(t *testing.T) {
	node := "t-" + randomHex(t)
	if err := shareDirectory(); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(directory, Prefix+node), nil, 0o444); err != nil {
		t.Fatal(err)
	}
	n := open(t, node)
	newTap(t, n)
}

func BenchmarkTap(b *testing.B) {
	n := open(b, "t-"+randomHex(b))
	b.Run("create", func(b *testing.B) {
		for b.Loop() {
			tap := newTap(b, n)
			b.StopTimer()
			if err := tap.Close(); err != nil {
				b.Fatal(err)
			}
			b.StartTimer()
		}
	})
	b.Run("close", func(b *testing.B) {
		for b.Loop() {
			b.StopTimer()
			tap := newTap(b, n)
			b.StartTimer()
			if err := tap.Close(); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("counters", func(b *testing.B) {
		tap := newTap(b, n)
		for b.Loop() {
			if _, _, err := tap.Counters(); err != nil {
				b.Fatal(err)
			}
		}
	})
}
