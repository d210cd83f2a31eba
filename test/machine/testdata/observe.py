"""Tells what must differ between machines: what programs take randomness from, names and addresses. With an argument it
tells random values only. Then it answers each line of standard input with the time."""
import json, os, random, secrets, subprocess, sys, tempfile, time, uuid

# What clones share may be shifted by a draw more or less, hence so many.
draws = [os.urandom(8).hex() for _ in range(64)]


def read(path):
    with open(path) as f:
        return f.read().strip()


def device(path):
    with open(path, "rb", 0) as f:
        return f.read(16).hex()


def output(*args):
    return subprocess.run(args, check=True, capture_output=True, text=True).stdout.strip()


def traits():
    maps = read("/proc/self/maps").splitlines()
    found = {
        "kernel uuid": read("/proc/sys/kernel/random/uuid"),
        "boot id": read("/proc/sys/kernel/random/boot_id"),
        "getrandom": os.getrandom(16).hex(),
        "/dev/urandom": device("/dev/urandom"),
        "/dev/random": device("/dev/random"),
        "random.random": str(random.random()),
        "another random.random": output("python3", "-c", "import random; print(random.random())"),
        "hash of a string": str(hash("ephemeral")),
        "secrets": secrets.token_hex(),
        "uuid4": str(uuid.uuid4()),
        "memory layout": maps[0].split("-")[0] + next(m.split("-")[0] for m in maps if m.endswith("[stack]")),
        "temporary name": tempfile.mktemp(),
        "SRANDOM": output("bash", "-c", "echo $SRANDOM $SRANDOM"),
        "hostname": os.uname().nodename,
        "/etc/hostname": read("/etc/hostname"),
        "machine id": read("/etc/machine-id"),
        "MAC address": read("/sys/class/net/eth0/address"),
        "address": [l for l in read("/proc/net/fib_trie").splitlines() if "-- 10." in l][0].split()[-1],
        "scratch": os.getcwd(),
    }
    if os.path.exists("/usr/bin/openssl"):
        found["openssl"] = output("openssl", "rand", "-hex", "16")
    return found


print(json.dumps({"draws": draws, "traits": {} if len(sys.argv) > 1 else traits()}))
for _ in sys.stdin:
    print(time.time_ns())
