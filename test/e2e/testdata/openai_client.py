"""An OpenAI-compatible client as programs bring one along: base URL and key from where the SDKs take them, one answer
whole and one streamed."""
import http.client, json, os
from urllib.parse import urlsplit

base = urlsplit(os.environ["OPENAI_BASE_URL"])


def post(stream):
    c = http.client.HTTPConnection(base.hostname, base.port or 80, timeout=60)
    body = {"model": os.environ["MODEL"], "messages": [{"role": "user", "content": "Grüezi"}], "stream": stream}
    c.request("POST", base.path + "/chat/completions", json.dumps(body), {
        "Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
        "X-Stainless-Lang": "python", "User-Agent": "OpenAI/Python"})
    return c.getresponse()


r = post(False)
whole = json.load(r)
print(r.status, whole["choices"][0]["message"]["content"], whole["usage"]["total_tokens"])
r = post(True)
assert r.getheader("Content-Type").startswith("text/event-stream"), r.getheaders()
text, pieces, ended = "", 0, False
for line in r:
    line = line.decode().strip()
    ended = ended or line == "data: [DONE]"
    if not line.startswith("data: ") or ended:
        continue
    for choice in json.loads(line[6:])["choices"]:
        piece = choice["delta"].get("content") or ""
        text, pieces = text + piece, pieces + bool(piece)
print(r.status, text, ended, pieces > 0)
