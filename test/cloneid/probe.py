"""Tells what must differ between machines that are clones of one: random values from every source that programs use, names,
addresses and ids. Prints one line of JSON and then answers each line of standard input with the time in nanoseconds.

Arguments: "draws" tells random values only; any other is the path of the Go probe. Sources that a machine has not are left out.
"""
import json, os, random, secrets, ssl, sys, time, uuid

# What clones share may be shifted by a draw more or less, hence so many.
draws = [os.urandom(8).hex() for _ in range(64)]


def read(path):
    with open(path) as f:
        return f.read().strip()


def device(path):
    with open(path, "rb", 0) as f:
        return f.read(16).hex()


def output(*args):
    """What a program prints. The module subprocess costs an emulated machine more than most programs do."""
    out, into = os.pipe()
    actions = [(os.POSIX_SPAWN_DUP2, into, 1), (os.POSIX_SPAWN_CLOSE, out)]
    pid = os.posix_spawnp(args[0], args, os.environ, file_actions=actions)
    os.close(into)
    with open(out) as f:
        text = f.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status != 0:
        raise OSError("%s: exit code %d" % (args[0], status))
    return text.strip()


def found_program(name):
    return any(os.access(os.path.join(d, name), os.X_OK) for d in os.get_exec_path())


def client_random():
    """The random bytes of a TLS ClientHello (RFC 8446, 4.1.2): behind the record's and the message's headers and the version."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # not the default one, which reads all certificates first
    tls = context.wrap_bio(incoming, outgoing, server_hostname="clone.example")
    try:
        tls.do_handshake()
    except ssl.SSLWantReadError:
        pass
    return outgoing.read()[11:43].hex()


def interfaces():
    for name in sorted(os.listdir("/sys/class/net")):
        if name != "lo":
            yield name, read("/sys/class/net/%s/address" % name)


def addresses():
    lines = read("/proc/net/fib_trie").splitlines()
    return sorted({a.split()[-1] for a, b in zip(lines, lines[1:]) if "host LOCAL" in b and not a.split()[-1].startswith("127.")})


def values():
    maps = read("/proc/self/maps").splitlines()
    found = {
        "kernel uuid": read("/proc/sys/kernel/random/uuid"),
        "boot id": read("/proc/sys/kernel/random/boot_id"),
        "getrandom": os.getrandom(32).hex(),
        "/dev/urandom": device("/dev/urandom"),
        "/dev/random": device("/dev/random"),
        "Python random": str(random.random()),
        "Python random, another process": output(sys.executable, "-I", "-S", "-c", "import random; print(random.random())"),
        "Python hash of a string": str(hash("clone")),
        "Python secrets": secrets.token_hex(),
        "Python uuid4": str(uuid.uuid4()),
        "Python uuid1": str(uuid.uuid1()),
        "TLS client random": client_random(),
        "OpenSSL, linked": ssl.RAND_bytes(16).hex(),
        "memory layout": maps[0].split("-")[0] + next(m.split("-")[0] for m in maps if m.endswith("[stack]")),
        "temporary name": output("mktemp", "-u"),
        "hostname": os.uname().nodename,
        "/etc/hostname": read("/etc/hostname"),
        "machine id": read("/etc/machine-id"),
        "working directory": os.getcwd(),
    }
    for name, address in interfaces():
        found["MAC address of " + name] = address
    if addresses():
        found["IP addresses"] = " ".join(addresses())
    if found_program("openssl"):
        found["openssl rand"] = output("openssl", "rand", "-hex", "16")
    if found_program("node"):
        found["node crypto"] = output("node", "-e", "console.log(require('crypto').randomBytes(16).toString('hex'), Math.random())")
    if found_program("bash"):
        found["bash SRANDOM"] = output("bash", "-c", "echo $SRANDOM $SRANDOM")
    for path in sys.argv[1:]:
        found.update(json.loads(output(path)))
    return found


print(json.dumps({"draws": draws, "values": {} if sys.argv[1:] == ["draws"] else values()}), flush=True)
for _ in sys.stdin:
    print(time.time_ns(), flush=True)
