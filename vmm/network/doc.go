// Package network is the wall between machines and every network. A node has one network namespace; in it are the
// loopback device, down, and one tap for each machine: no bridge, no route, no address, no second interface. What a guest
// sends arrives on its tap and has nowhere to go: the absence of any path is the guarantee. An nftables rule that drops
// and counts at the tap's ingress is the second line, and a drop policy for everything the namespace itself would receive,
// forward or send the third.
//
// VMM processes are started by a thread that lives in the namespace (Network.Do), so a VMM that was taken over has no
// network either.
package network
