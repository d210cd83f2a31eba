"""Tries to reach others from inside a machine. The job comes in on standard input, what became of it goes out."""
import errno, fcntl, json, os, select, socket, struct, sys, time

job = json.load(sys.stdin)
mark = job["mark"].encode()
own = socket.inet_aton(job["address"])
root = os.geteuid() == 0
sent, got, refused, waiting, talking = {}, [], {}, {}, []


def attempt(kind, do):
    """do sends one packet at least."""
    try:
        do()
        sent[kind] = sent.get(kind, 0) + 1
        return True
    except OSError as e:
        name = kind + " " + errno.errorcode.get(e.errno, str(e))
        refused[name] = refused.get(name, 0) + 1
        return False


def stays(address):
    return address.startswith("127.") or address in ("::1", "0.0.0.0", job["address"])


def at(address, port):
    """The socket address, with the zone of a link-local one."""
    return socket.getaddrinfo(address, port, flags=socket.AI_NUMERICHOST)[0][4]


def tcp(family, address, port):
    s = socket.socket(family, socket.SOCK_STREAM)
    s.setblocking(False)
    code = s.connect_ex(at(address, port))
    if code == 0:
        got.append(f"TCP connection to {address} {port}")
    elif code == errno.EINPROGRESS:
        waiting[s.fileno()] = (s, f"TCP connection to {address} {port}")
    else:
        raise OSError(code, os.strerror(code))


def udp(family, address, port, data):
    s = socket.socket(family, socket.SOCK_DGRAM)
    s.setblocking(False)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
    if not stays(address):
        talking.append((s, f"UDP answer from {address} {port}"))
    s.sendto(data, at(address, port))


def ping(family, protocol, kind, address):
    s = socket.socket(family, socket.SOCK_DGRAM, protocol)
    s.setblocking(False)
    if not stays(address):  # it does answer itself
        talking.append((s, f"echo reply from {address}"))
    s.sendto(struct.pack("!BBHHH", kind, 0, 0, 1, 1) + mark, at(address, 0))


def query():
    name = b"".join(bytes([len(p)]) + p for p in (mark, b"example", b"com"))
    return struct.pack("!HHHHHH", 0x1234, 0x0100, 1, 0, 0, 0) + name + b"\0" + struct.pack("!HH", 1, 1)


def sockets(family, addresses, six, note=""):
    for address in addresses:
        where = ("IPv6" if six else "IPv4") + note
        if stays(address):
            where += " own"
        for port in job["ports"]:
            attempt(f"{where} TCP", lambda: tcp(family, address, port))
            attempt(f"{where} UDP", lambda: udp(family, address, port, mark))
        attempt(f"{where} DNS", lambda: udp(family, address, 53, query()))
        if six:
            attempt(f"{where} ICMP", lambda: ping(family, socket.IPPROTO_ICMPV6, 128, address))
        else:
            attempt(f"{where} ICMP", lambda: ping(family, socket.IPPROTO_ICMP, 8, address))


def enable_ipv6():
    for name in ("all", "default", "eth0"):
        base = f"/proc/sys/net/ipv6/conf/{name}/"
        for key, value in (("accept_dad", "0"), ("disable_ipv6", "0")):
            with open(base + key, "w") as f:
                f.write(value)
    index = socket.if_nametoindex("eth0")
    address = socket.inet_pton(socket.AF_INET6, "fd00::1234")
    with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as s:
        fcntl.ioctl(s, 0x8916, struct.pack("16sIi", address, 64, index))  # SIOCSIFADDR
        zero = bytes(16)  # SIOCADDRT: a default route through the card, RTF_UP
        fcntl.ioctl(s, 0x890B, struct.pack("16s16s16sIHHI4xLIi", zero, zero, zero, 0, 0, 0, 1, 0, 1, index))


def enable_arp():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        request = struct.pack("16sH14x", b"eth0", 0)
        flags = struct.unpack("16sH14x", fcntl.ioctl(s, 0x8913, request))[1]  # SIOCGIFFLAGS
        flags = flags & ~0x80 | 0x100  # without IFF_NOARP, with IFF_PROMISC
        fcntl.ioctl(s, 0x8914, struct.pack("16sH14x", b"eth0", flags))  # SIOCSIFFLAGS


def checksum(b):
    total = sum(struct.unpack(f"!{len(b) // 2}H", b))
    while total > 0xFFFF:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def ipv4(source, target, protocol, payload):
    head = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 20 + len(payload), 1, 0x4000, 64, protocol, 0, source, target)
    return head[:10] + struct.pack("!H", checksum(head)) + head[12:] + payload


def segment(protocol, port):
    if protocol == socket.IPPROTO_TCP:
        return struct.pack("!HHIIBBHHH", 40000, port, 1, 0, 0x50, 2, 0xFF00, 0, 0) + mark
    if protocol == socket.IPPROTO_UDP:
        return struct.pack("!HHHH", 40000, port, 8 + len(mark), 0) + mark
    if protocol == socket.IPPROTO_ICMP:
        body = struct.pack("!BBHHH", 8, 0, 0, 1, 1) + mark
        return body[:2] + struct.pack("!H", checksum(body)) + body[4:]
    return mark


def raw_ip():
    s = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
    for address in job["v4"]:
        if stays(address):
            continue
        target = socket.inet_aton(address)
        for source in (own, socket.inet_aton(job["peer"]), target):
            for protocol in (1, 6, 17, 47, 50, 132):
                packet = ipv4(source, target, protocol, segment(protocol, job["ports"][0]))
                attempt("raw IP", lambda: s.sendto(packet, (address, 0)))


def frames():
    me, peer = bytes.fromhex(job["mac"].replace(":", "")), bytes.fromhex(job["peer_mac"].replace(":", ""))
    everyone = b"\xff" * 6
    link = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
    link.bind(("eth0", 0))
    groups = [bytes.fromhex(m) for m in ("01005e0000fb", "0180c2000000", "0180c200000e", "333300000001")]
    for to in [everyone, peer, me, bytes.fromhex("02aabbccddee")] + groups:
        for source in (me, peer):
            for kind in (0x8100, 0x88CC, 0x88B5, 0x8863, 0x8864, 0x8847, 0x86DD, len(mark)):
                attempt("frame", lambda: link.send(to + source + struct.pack("!H", kind) + mark + bytes(30)))
            for address in job["v4"]:
                target = socket.inet_aton(address)
                for operation in (1, 2):
                    body = struct.pack("!HHBBH", 1, 0x0800, 6, 4, operation) + source + own + bytes(6) + target + mark
                    attempt("ARP", lambda: link.send(to + source + b"\x08\x06" + body))
                for protocol in (1, 6, 17):
                    packet = ipv4(own, target, protocol, segment(protocol, job["ports"][0]))
                    attempt("frame", lambda: link.send(to + source + b"\x08\x00" + packet))
            time.sleep(0.02)  # no more than the card's queue takes


if root:
    enable_ipv6()
ears = None
try:
    ears = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
    ears.bind(("eth0", 3))
    ears.setblocking(False)
except PermissionError:
    refused["AF_PACKET EPERM"] = 1

sockets(socket.AF_INET, job["v4"], False)
sockets(socket.AF_INET6, job["v6"], True)
if root:
    raw_ip()
    frames()
    enable_arp()
    sockets(socket.AF_INET, job["v4"], False, " unresolved")  # what leaves now is the question for the address

poll = select.poll()
for number in waiting:
    poll.register(number, select.POLLOUT)
end = time.monotonic() + 5
while waiting and time.monotonic() < end:
    for number, _ in poll.poll(200):
        s, what = waiting.pop(number)
        poll.unregister(number)
        code = s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code == 0:
            got.append(what)
        else:
            name = "TCP later " + errno.errorcode.get(code, str(code))
            refused[name] = refused.get(name, 0) + 1
mine = {job["address"], "127.0.0.1"}
if os.path.exists("/proc/net/if_inet6"):
    with open("/proc/net/if_inet6") as f:
        mine |= {socket.inet_ntop(socket.AF_INET6, bytes.fromhex(line.split()[0])) for line in f}
for s, what in talking:
    try:
        source = s.recvfrom(2048)[1][0].split("%")[0]
        if source not in mine:  # a machine hears what it sends to groups, and answers itself
            got.append(f"{what}, sent by {source}")
    except OSError:
        pass
if ears is not None:
    while True:
        try:
            data, where = ears.recvfrom(4096)
        except BlockingIOError:
            break
        except OSError:
            continue
        if where[2] != 4:  # PACKET_OUTGOING
            got.append("frame from outside: " + data[:64].hex())

try:
    socket.getaddrinfo("example.com", 443)
    got.append("an address of example.com")
except socket.gaierror:
    pass
json.dump({"sent": sent, "got": got, "refused": refused}, sys.stdout)
