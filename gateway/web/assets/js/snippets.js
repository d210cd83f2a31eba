// The request of the form as a program: exactly what the form sends, in curl, Go and Python.

import { copyButton, h } from './dom.js';
import { t } from './i18n.js';

const pretty = (request) => JSON.stringify(request, null, 2);

// escaped writes the characters of the set as JSON escapes, which mean the same inside JSON's strings.
const escaped = (json, set) => json.replace(set, (c) => `\\u${c.charCodeAt(0).toString(16).padStart(4, '0')}`);

const curl = (request, origin) => `curl -sS "\${EPHEMERAL_URL:-${origin}}/v1/runs" \\
  -H "Authorization: Bearer $EPHEMERAL_API_KEY" \\
  -H "Content-Type: application/json" \\
  -H "Idempotency-Key: $(uuidgen)" \\
  -H "Prefer: wait=60" \\
  --data-binary @- <<'JSON'
${pretty(request)}
JSON
`;

const go = (request, origin) => `package main

import (
	"context"
	"encoding/json"
	"fmt"
	"log"
	"os"

	"github.com/ephemeral-run/ephemeral/client"
)

const request = \`${escaped(pretty(request), /`/g)}\`

func main() {
	ctx := context.Background()
	c, err := client.New("${origin}", os.Getenv("EPHEMERAL_API_KEY"))
	if err != nil {
		log.Fatal(err)
	}
	created, err := c.CreateRunJSON(ctx, json.RawMessage(request), client.CreateOptions{})
	if err != nil {
		log.Fatal(err)
	}
	run, err := c.Wait(ctx, created.Run.ID)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(run.State, run.Money.Charged)
	if run.Result != nil {
		fmt.Println(run.Result.Output)
	}
}
`;

const python = (request, origin) => `import json, os, urllib.request, uuid

request = r"""${escaped(pretty(request), /"(?=""|"$)/g)}"""

answer = urllib.request.urlopen(urllib.request.Request(
    os.environ.get("EPHEMERAL_URL", "${origin}") + "/v1/runs",
    data=request.encode(),
    headers={
        "Authorization": "Bearer " + os.environ["EPHEMERAL_API_KEY"],
        "Content-Type": "application/json",
        "Idempotency-Key": str(uuid.uuid4()),
        "Prefer": "wait=60",
    },
))
run = json.load(answer)
print(run["state"], run["money"]["charged_micros"])
print(run.get("result", {}).get("output", ""))
`;

const kinds = [['curl', 'curl', curl], ['go', 'Go', go], ['python', 'Python', python]];

// Snippets shows the programs; update gives them another request.
export class Snippets {
  #request = {};
  #kind = kinds[0];

  constructor(root) {
    this.code = h('pre', { class: 'snippet', tabindex: '0', dir: 'ltr', translate: 'no', role: 'group', 'aria-label': t('play.code') });
    const choices = kinds.map((kind, i) => h('label', {}, h('input', { type: 'radio', name: 'snippet', value: kind[0], checked: i === 0, on: { change: () => { this.#kind = kind; this.#draw(); } } }), h('span', { translate: 'no' }, kind[1])));
    root.replaceChildren(h('div', { class: 'snippet-head' }, h('fieldset', { class: 'segmented small' }, h('legend', { class: 'sr' }, t('play.code')), choices),
      copyButton(t('word.copy'), t('word.copied'), () => this.code.textContent)), this.code);
  }

  update(request) {
    this.#request = request;
    this.#draw();
  }

  #draw() { this.code.textContent = this.#kind[2](this.#request, location.origin); }
}
