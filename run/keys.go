package run

import (
	"crypto/sha256"
	"encoding/hex"
	"strings"
)

// schema is the version of what the store keeps; a cell written by another version is refused.
const schema = "2"

// keys builds every Redis key and channel of one cell. All carry the cell's hash tag, so that a cell fits one slot of a
// Redis Cluster. Organisations are [a-z0-9_-], run ids and key ids likewise: nothing needs quoting.
type keys struct{ cell string }

func (k keys) at(parts ...string) string {
	n := len("{}") + len(k.cell)
	for _, p := range parts {
		n += len(":") + len(p)
	}
	var b strings.Builder
	b.Grow(n)
	b.WriteByte('{')
	b.WriteString(k.cell)
	b.WriteByte('}')
	for _, p := range parts {
		b.WriteByte(':')
		b.WriteString(p)
	}
	return b.String()
}

// One per cell.
func (k keys) schema() string { return k.at("schema") } // string: schema
func (k keys) orgs() string   { return k.at("orgs") }   // zset: organisations by time of creation
func (k keys) ring() string   { return k.at("ring") }   // zset: organisations that a take may serve, by turn
func (k keys) turn() string   { return k.at("turn") }   // counter: turns given so far
func (k keys) leases() string { return k.at("leases") } // zset: leased runs by end of the lease
func (k keys) stain() string  { return k.at("stain") }  // string: a snapshot of Redis holds content that must go
func (k keys) fence() string  { return k.at("fence") }  // string: written before each WAIT
func (k keys) scrub() string  { return k.at("scrub") }  // string: a new snapshot was asked for lately
func (k keys) forget() string { return k.at("forget") } // string: when a new snapshot was last due without a reason
func (k keys) due() string    { return k.at("due") }    // zset: runs whose content is to be erased, by when (ms)
func (k keys) nodes() string  { return k.at("nodes") }  // hash: what each node last said of itself, as JSON

func (k keys) slots() string { return k.at("leases", "slots") } // hash: "runs at once, until" by node

// Beside these the scripts keep, under names with a suffix:
//
//	leases:since, org:<org>:active:since      zset: leased runs by the time they were taken
//	leases:service, org:<org>:service         hash: mean and mean square of how long they were leased, in milliseconds
//	org:<org>:queue:refused                   zset: refused requests by the time they were told to come again

// Channels.
func (k keys) events() string  { return k.at("events") }  // every event, whole
func (k keys) work() string    { return k.at("work") }    // an organisation has work
func (k keys) cancels() string { return k.at("cancels") } // a run was asked to cancel
func (k keys) revoked() string { return k.at("revoked") } // an organisation revoked a key or a share

// One per organisation.
func (k keys) org(org string) string    { return k.at("org", org) }           // hash: name, limits, account
func (k keys) queue(org string) string  { return k.at("org", org, "queue") }  // zset: waiting runs by time of admission
func (k keys) active(org string) string { return k.at("org", org, "active") } // set: leased runs
func (k keys) runs(org string) string   { return k.at("org", org, "runs") }   // zset: all runs kept, by id
func (k keys) ledger(org string) string { return k.at("org", org, "ledger") } // hash: entries d:<reference>, c:<run>

// entries has the ledger's entries in order: the n-th is entry n, "name balance", with the balance after it.
func (k keys) entries(org string) string { return k.at("org", org, "entries") } // list

// connections has the organisation's connections as JSON, by name.
func (k keys) connections(org string) string { return k.at("org", org, "connections") } // hash

// receiptKeys has the public keys of receipts, by id.
func (k keys) receiptKeys() string { return k.at("receiptkeys") } // hash

// parked holds runs that wait for others of their API key to end before they may wait in the queue.
func (k keys) parked(org string) string { return k.at("org", org, "parked") } // zset: like queue

// usage sums up the runs that ended on each day: by day since 1970 (UTC) the counts of tally() in lib.lua.
func (k keys) usage(org string) string { return k.at("org", org, "usage") } // hash

// members are the people and services of an organisation; memberKeys are the keys of one, by the SHA-256 of their secrets.
func (k keys) members(org string) string        { return k.at("org", org, "members") }            // hash: as JSON, by id
func (k keys) memberKeys(org, id string) string { return k.at("org", org, "member", id, "keys") } // set

// orgKeys indexes the API keys of an organisation, or the admin keys when org is empty.
func (k keys) orgKeys(org string) string {
	if org == "" {
		return k.at("keys")
	}
	return k.at("org", org, "keys")
}

// pot has what was given of the trial credit; signUps is the rate of an address, by the SHA-256 of it.
func (k keys) pot() string               { return k.at("signup") }                 // hash: given, count
func (k keys) signUps(sum string) string { return k.at("signup", "address", sum) } // string: see signup.lua

// signUp remembers an idempotency key of a sign-up, by its SHA-256.
func (k keys) signUp(sum string) string { return k.at("idem", "signup", sum) } // string: SHA-256 of the name

// One per API key.
func (k keys) key(id string) string       { return k.at("key", id) }           // string: SHA-256 of the secret
func (k keys) limits(id string) string    { return k.at("key", id, "limits") } // hash: limits, slots and waiting runs of a limited key
func (k keys) keyParked(id string) string { return k.at("key", id, "parked") } // zset: the key's part of parked
func (k keys) secret(sum string) string   { return k.at("secret", sum) }       // hash: the key, by SHA-256 of its secret
func (k keys) rate(sum string) string     { return k.at("rate", sum) }         // string: see authenticate.lua
func (k keys) answer(call string) string  { return k.at("answer", call) }      // string: what a take took

// idem is the idempotency record: scope is organisation and endpoint, the client's key is hashed since it may be any text.
func (k keys) idem(org, key string) string {
	sum := sha256.Sum256([]byte(key))
	return k.at("idem", "runs", org, hex.EncodeToString(sum[:]))
}

// uploaded is the idempotency record of an upload: "<SHA-256> <size> <id>".
func (k keys) uploaded(org, key string) string {
	sum := sha256.Sum256([]byte(key))
	return k.at("idem", "uploads", org, hex.EncodeToString(sum[:]))
}

// One per upload. Scripts derive these names, and those of the bookkeeping below, from the cell's (lib.lua).
func (k keys) upload(id string) string        { return k.at("upload", id) }            // hash: org, size, SHA-256, times
func (k keys) uploadContent(id string) string { return k.at("upload", id, "content") } // string: raw bytes
func (k keys) holders(id string) string       { return k.at("upload", id, "holders") } // set: runs that wait for it

// hiddenUploads are those under zero data retention that no run holds, by when they expire (ms).
func (k keys) hiddenUploads() string { return k.at("uploads") } // zset

// uploads are those that an organisation has, as "<id> <bytes>" by when they expire (ms; +inf: held); uploadBytes is the sum.
func (k keys) uploads(org string) string     { return k.at("org", org, "uploads") }          // zset
func (k keys) uploadBytes(org string) string { return k.at("org", org, "uploads", "bytes") } // counter

// One per run.
func (k keys) run(id string) string       { return k.at("run", id) }           // hash: the record
func (k keys) runEvents(id string) string { return k.at("run", id, "events") } // list: events as JSON
func (k keys) calls(id string) string     { return k.at("run", id, "calls") }  // hash: "state kind granted captured" by call id
func (k keys) spec(id string) string      { return k.at("run", id, "spec") }   // string: the whole spec where the record's is not
func (k keys) output(id string) string    { return k.at("run", id, "output") } // string: the worker's final answer
func (k keys) stdout(id string) string    { return k.at("run", id, "stdout") } // string: raw bytes
func (k keys) stderr(id string) string    { return k.at("run", id, "stderr") } // string: raw bytes

// left lists the files that a run left, as JSON; content is what is in them, one after the other.
func (k keys) left(id string) string    { return k.at("run", id, "left") }    // string
func (k keys) content(id string) string { return k.at("run", id, "content") } // string: raw bytes

// shares has what lets others read the run: "SHA-256 created expires" by the share's id.
func (k keys) shares(id string) string { return k.at("run", id, "shares") } // hash
func (k keys) share(sum string) string { return k.at("share", sum) }        // hash: run, org, expires_us; by SHA-256 of the token

// names remembers which events were appended, until the run ends.
func (k keys) names(id string) string { return k.at("run", id, "names") } // set: hashes of events

// closing lists the keys that ending a run touches, in the order that the scripts expect (closing() in lib.lua). Those
// of the API key have <key> in the place of the API key's id, which the run's record holds.
func (k keys) closing(org, id string) []string {
	return []string{k.run(id), k.runEvents(id), k.calls(id), k.spec(id), k.output(id), k.stdout(id), k.stderr(id),
		k.org(org), k.queue(org), k.active(org), k.ledger(org), k.leases(), k.ring(), k.names(id), k.stain(), k.entries(org),
		k.parked(org), k.limits("<key>"), k.keyParked("<key>"), k.left(id), k.content(id), k.due(), k.usage(org)}
}

// runAround is what stands before and after a run's id in the key of its record.
func (k keys) runAround() (prefix, suffix string) {
	prefix, suffix, _ = strings.Cut(k.run("<run>"), "<run>")
	return prefix, suffix
}
