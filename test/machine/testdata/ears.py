"""Listens in a machine, for frames and on ports, until standard input ends, and tells what came. Then it speaks to itself
and tells again: that it would have heard something."""
import json, select, socket, sys, time

job = json.loads(sys.stdin.readline())
mark = job["mark"].encode()
heard = {"marked": 0, "foreign": 0, "tcp": 0, "udp": 0}
poll, kinds = select.poll(), {}


def add(s, kind):
    s.setblocking(False)
    kinds[s.fileno()] = (s, kind)
    poll.register(s.fileno(), select.POLLIN)


add(socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)), "frame")
for port in job["ports"]:
    s = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    s.bind(("0.0.0.0", port))
    s.listen()
    add(s, "tcp")
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    s.bind(("0.0.0.0", port))
    add(s, "udp")


def listen(timeout):
    """Returns whether standard input has something to say."""
    for number, _ in poll.poll(timeout):
        if number == 0:
            return True
        s, kind = kinds[number]
        try:
            if kind == "tcp":
                s.accept()
                heard["tcp"] += 1
            elif kind == "udp":
                s.recv(4096)
                heard["udp"] += 1
            else:
                data, where = s.recvfrom(65536)
                heard["marked"] += mark in data
                heard["foreign"] += where[0] == "eth0" and where[2] != 4
        except OSError:
            pass
    return False


poll.register(0, select.POLLIN)
print(json.dumps(heard))
while not listen(None):
    pass
poll.unregister(0)
end = time.monotonic() + 1
while time.monotonic() < end:
    listen(100)
print(json.dumps(heard))

socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(mark, ("127.0.0.1", job["ports"][0]))
with socket.create_connection(("127.0.0.1", job["ports"][0])):
    end = time.monotonic() + 10
    while time.monotonic() < end and not (heard["tcp"] and heard["udp"] and heard["marked"]):
        listen(100)
print(json.dumps(heard))
