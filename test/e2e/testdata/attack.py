"""Makes 64 model calls at once and prints the status of each."""
import http.client, json, threading
from concurrent.futures import ThreadPoolExecutor

CALLS = 64
body = json.dumps({"max_tokens": 64, "stream": True, "messages": [{"role": "user", "content": "hello"}]})
together = threading.Barrier(CALLS)


def call(_):
    together.wait()
    c = http.client.HTTPConnection("broker.local", timeout=60)
    try:
        c.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        r = c.getresponse()
    except (OSError, http.client.HTTPException) as e:
        return type(e).__name__
    try:
        r.read()
    except (OSError, http.client.HTTPException):
        pass  # it broke off
    return r.status


with ThreadPoolExecutor(CALLS) as pool:
    for status in pool.map(call, range(CALLS)):
        print(status)
