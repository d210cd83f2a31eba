"""Tells what must differ between machines that are clones of one: random values from every source that programs use, names,
addresses and ids. Prints one line for each, "draw", a tab and a random value or "value", a tab, its name, a tab and the value,
then an empty line, and then answers each line of standard input with the time in nanoseconds.

Arguments: "draws" tells random values only; any other is the path of the Go probe. Sources that a machine has not are left out.

It starts in each of a thousand machines, emulated ones too, where a module costs up to a second: so it imports what Python
itself is started with, and the modules in C beneath those of its library.
"""
import os, random, sys, time

# What clones share may be shifted by a draw more or less, hence so many.
for _ in range(64):
    sys.stdout.write("draw\t%s\n" % os.urandom(8).hex())


def read(path):
    with open(path, "rb", 0) as f:
        return f.read().decode("utf-8", "replace").strip()


def device(path):
    with open(path, "rb", 0) as f:
        return f.read(16).hex()


def output(*args):
    """What a program prints."""
    out, into = os.pipe()
    actions = [(os.POSIX_SPAWN_DUP2, into, 1), (os.POSIX_SPAWN_CLOSE, out)]
    pid = os.posix_spawnp(args[0], args, os.environ, file_actions=actions)
    os.close(into)
    with open(out, "rb") as f:
        text = f.read().decode("utf-8", "replace")
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status != 0:
        raise OSError("%s: exit code %d" % (args[0], status))
    return text.strip()


def found_program(name):
    return any(os.access(os.path.join(d, name), os.X_OK) for d in os.get_exec_path())


def linked_openssl():
    """Of the library that Python is linked to: a draw, and the random bytes of a TLS ClientHello (RFC 8446, 4.1.2), which are
    behind the record's and the message's headers and the version."""
    try:
        import _ssl as tls  # without the module's enumerations, certificates and sockets

        incoming, outgoing = tls.MemoryBIO(), tls.MemoryBIO()
        client = tls._SSLContext(tls.PROTOCOL_TLS_CLIENT)._wrap_bio(incoming, outgoing, False, server_hostname="clone.example")
    except (AttributeError, TypeError):  # its inner parts are not everywhere the same
        import ssl as tls

        incoming, outgoing = tls.MemoryBIO(), tls.MemoryBIO()
        client = tls.SSLContext(tls.PROTOCOL_TLS_CLIENT).wrap_bio(incoming, outgoing, server_hostname="clone.example")
    try:
        client.do_handshake()
    except tls.SSLWantReadError:
        pass
    yield "TLS client random", outgoing.read()[11:43].hex()
    yield "OpenSSL, linked", tls.RAND_bytes(16).hex()


def interfaces():
    for name in sorted(os.listdir("/sys/class/net")):
        if name != "lo":
            yield name, read("/sys/class/net/%s/address" % name)


def addresses():
    lines = read("/proc/net/fib_trie").splitlines()
    return sorted({a.split()[-1] for a, b in zip(lines, lines[1:]) if "host LOCAL" in b and not a.split()[-1].startswith("127.")})


def python():
    yield "Python random", str(random.random())  # seeded when the module was loaded
    yield "Python random, seeded again", str(random.Random().random())
    yield "Python hash of a string", str(hash("clone"))
    yield "Python SystemRandom", random.SystemRandom().randbytes(32).hex()  # the module secrets is this
    yield "Python os.urandom", os.urandom(16).hex()  # uuid4 is this
    try:
        import _uuid

        yield "Python uuid1", _uuid.generate_time_safe()[0].hex()
    except (ImportError, AttributeError, TypeError):
        import uuid

        yield "Python uuid1", str(uuid.uuid1())


def values():
    maps = read("/proc/self/maps").splitlines()
    yield "kernel uuid", read("/proc/sys/kernel/random/uuid")
    yield "boot id", read("/proc/sys/kernel/random/boot_id")
    yield "getrandom", os.getrandom(32).hex()
    yield "/dev/urandom", device("/dev/urandom")
    yield "/dev/random", device("/dev/random")
    yield "memory layout", maps[0].split("-")[0] + next(m.split("-")[0] for m in maps if m.endswith("[stack]"))
    yield "hostname", os.uname().nodename
    yield "/etc/hostname", read("/etc/hostname")
    yield "machine id", read("/etc/machine-id")
    yield "working directory", os.getcwd()
    yield from python()
    yield from linked_openssl()
    for name, address in interfaces():
        yield "MAC address of " + name, address
    if addresses():
        yield "IP addresses", " ".join(addresses())
    yield "temporary name", output("mktemp", "-u")
    if found_program("openssl"):
        yield "openssl rand", output("openssl", "rand", "-hex", "16")
    if found_program("node"):
        yield "node crypto", output("node", "-e", "console.log(require('crypto').randomBytes(16).toString('hex'), Math.random())")
    if found_program("bash"):
        yield "bash SRANDOM", output("bash", "-c", "echo $SRANDOM $SRANDOM")


if sys.argv[1:] != ["draws"]:
    for name, value in values():
        sys.stdout.write("value\t%s\t%s\n" % (name, value.encode("unicode_escape").decode()))
    for path in sys.argv[1:]:
        sys.stdout.write(output(path) + "\n")
print(flush=True)
for _ in sys.stdin:
    print(time.time_ns(), flush=True)
