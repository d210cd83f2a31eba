// The pages in a real browser, against a real server with real machines.

import assert from 'node:assert/strict';
import { execFile } from 'node:child_process';
import { mkdir, mkdtemp, readFile, rm, writeFile } from 'node:fs/promises';
import { createRequire } from 'node:module';
import { tmpdir } from 'node:os';
import { dirname, join } from 'node:path';
import { after, before, describe, test } from 'node:test';
import { fileURLToPath } from 'node:url';
import { promisify } from 'node:util';
import { launch } from './browser.mjs';
import { startLine } from './line.mjs';
import { api, startServer } from './server.mjs';

const here = dirname(fileURLToPath(import.meta.url));
const repo = join(here, '..', '..');
const screens = join(repo, 'build', 'screens');
const axeSource = await readFile(createRequire(import.meta.url).resolve('axe-core/axe.min.js'), 'utf8');
const sandboxProof = JSON.parse(await readFile(join(repo, 'docs', 'examples', 'sandbox-proof', 'request.json'), 'utf8'));
const languages = ['en', 'pt-BR', 'de', 'ko', 'ja'];
const limit = 40_000; // for a run to end, in milliseconds

let server;
let browser;

before(async () => {
  await mkdir(screens, { recursive: true });
  [server, browser] = await Promise.all([startServer(), launch()]);
}, { timeout: 300_000 });

after(async () => {
  await browser?.close();
  await server?.stop();
});

const texts = (language) => readFile(join(repo, 'gateway', 'web', 'i18n', `${language}.json`), 'utf8').then(JSON.parse);

// open opens a page with a key, and fails the test for anything that the browser complains about.
async function open(path, { key = server.key, language = 'en', scheme = 'light', width = 1280, height = 860, faults = [], base = server.url } = {}) {
  const context = await browser.newContext({ locale: language, colorScheme: scheme, viewport: { width, height } });
  await context.grantPermissions(['clipboard-read', 'clipboard-write']);
  const page = await context.newPage();
  page.setDefaultTimeout(limit);
  const complaints = [];
  page.on('pageerror', (error) => complaints.push(error.message));
  page.on('console', (m) => { if (m.type() === 'error' && !faults.some((f) => m.text().includes(f))) complaints.push(m.text()); });
  page.on('request', (r) => { if (!r.url().startsWith(base)) complaints.push(`a request to ${r.url()}`); });
  if (key) await page.addInitScript((k) => { if (!sessionStorage.getItem('visited')) { sessionStorage.setItem('visited', '1'); sessionStorage.setItem(location.pathname === '/ops' ? 'ephemeral-admin-key' : 'ephemeral-key', k); } }, key);
  await page.addInitScript(() => {
    window.shifts = 0;
    window.shifted = []; // what moved, to find out why
    new PerformanceObserver((list) => { for (const e of list.getEntries()) if (!e.hadRecentInput) { window.shifts += e.value; window.shifted.push(...e.sources.map((s) => `${s.node?.nodeName}.${s.node?.className} ${s.previousRect.y}+${s.previousRect.height} to ${s.currentRect.y}+${s.currentRect.height}`)); } }).observe({ type: 'layout-shift', buffered: true });
  });
  await page.goto(base + path);
  return { page, close: async () => { await context.close(); assert.deepEqual(complaints, []); } };
}

const picture = (page, name) => page.screenshot({ path: join(screens, `${name}.png`), animations: 'disabled' });

async function accessible(page) {
  const found = await page.evaluate(`(() => { const module = undefined; const exports = undefined; ${axeSource}; return window.axe.run(document, { resultTypes: ['violations'] }); })()`);
  assert.deepEqual(found.violations.map((v) => `${v.id}: ${v.nodes.map((n) => n.target.join(' ')).join('; ')}`), []);
}

async function finished(request) {
  const { id } = await api(server, 'POST', '/v1/runs', request);
  return ended(id);
}

async function ended(id) {
  const end = Date.now() + limit;
  while (Date.now() < end) {
    const run = await fetch(`${server.url}/v1/runs/${id}`, { headers: { Authorization: `Bearer ${server.key}`, Prefer: 'wait=20' } }).then((a) => a.json());
    if (run.ended_at) return run;
  }
  throw new Error(`${id} has not ended`);
}

const lastRow = (page) => page.locator('.event[data-type="worker.destroyed"]');
const rows = (page) => page.locator('.event:not([hidden])').evaluateAll((all) => all.map((e) => e.dataset.type));

describe('languages', () => {
  for (const language of languages) {
    test(`the example runs live and is replayed in ${language}`, async () => {
      const t = await texts(language);
      const scheme = languages.indexOf(language) % 2 === 0 ? 'light' : 'dark';
      const { page, close } = await open('/', { language, scheme });
      assert.equal(await page.locator('html').getAttribute('lang'), language);
      await page.locator('.balance').waitFor();
      await page.locator('#examples button[data-example="sandbox-proof"]').click();
      await page.locator('#go').click();
      await page.locator('.event[data-type="queued"]').waitFor();
      await lastRow(page).waitFor();
      await page.locator('.replay:not(.idle)').waitFor();
      assert.deepEqual((await rows(page)).filter((type) => !['model', 'shell', 'files'].includes(type)), ['queued', 'microvm.ready', 'worker.started', 'microvm.destroyed', 'succeeded', 'worker.destroyed']);
      assert.equal((await rows(page)).filter((type) => type === 'shell').length, 4);
      assert.equal((await rows(page)).filter((type) => type === 'model').length, 3);
      assert.equal(await page.locator('.run-head .state').textContent(), t['state.succeeded']);
      assert.match(await page.locator('.result').innerText(), /2 3 5 7 11 13 17 19 23 29 31 37 41 43 47/);
      assert.equal(await page.locator('.result ol > li').count(), 4);
      await picture(page, `playground-${language}-${scheme}`);

      // The same run again at each speed, from the recorded times.
      const end = await page.locator('.replay input[type=range]').getAttribute('max');
      for (const [speed, bound] of [['2', 1 / 2], ['8', 1 / 8]]) {
        const began = Date.now();
        await page.locator(`.replay input[value="${speed}"] + span`).click();
        await page.waitForFunction(() => document.querySelectorAll('.event[hidden]').length > 0);
        await page.waitForFunction(() => document.querySelectorAll('.event[hidden]').length === 0);
        assert.ok(Date.now() - began >= Number(end) * bound * 0.8, `${speed}x took ${Date.now() - began} ms of ${end} ms`);
      }
      await page.locator('.replay input[type=range]').fill('0');
      assert.deepEqual(await rows(page), ['queued']);
      await page.locator('.replay input[value="Infinity"] + span').click();
      assert.equal(await page.locator('.event[hidden]').count(), 0);

      // Nothing but code and names may be left in English.
      if (language === 'ko' || language === 'ja') {
        const left = await page.evaluate(() => {
          const found = [];
          const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
          for (let n = walk.nextNode(); n; n = walk.nextNode()) {
            if (n.parentElement.closest('code, pre, textarea, option, script, noscript, .result, .recent-what, [translate=no]')) continue;
            if (/[A-Za-z]{2,} [A-Za-z]{2,}/.test(n.data)) found.push(n.data.trim());
          }
          return found;
        });
        assert.deepEqual(left, []);
      }
      await page.locator('#language').selectOption(language === 'de' ? 'en' : 'de');
      await page.waitForFunction((l) => document.documentElement.lang === l, language === 'de' ? 'en' : 'de');
      await page.reload();
      assert.equal(await page.locator('html').getAttribute('lang'), language === 'de' ? 'en' : 'de');
      await lastRow(page).waitFor(); // the run is still there
      await close();
    });
  }
});

describe('a run', () => {
  test('goes on after a broken connection, without a gap, and nothing jumps', async (context) => {
    const { id } = await api(server, 'POST', '/v1/runs', { prompt: 'go slowly', model: 'replay/slow' });
    const line = await startLine(server.url);
    context.after(() => line.close());
    const { page, close } = await open(`/runs/${id}`, { base: line.url, faults: ['ERR_CONNECTION', 'ERR_INCOMPLETE', 'ERR_EMPTY'] });
    await page.locator('.link.live').waitFor();
    await page.locator('.event[data-type="shell"]').first().waitFor();
    await picture(page, 'run-live');
    line.cut();
    await page.locator('.link.lost').waitFor();
    await picture(page, 'run-reconnecting');
    await accessible(page);
    line.mend();
    await page.locator('.replay:not(.idle)').waitFor();
    const seqs = await page.locator('.event').evaluateAll((all) => all.map((e) => Number(e.dataset.seq)));
    assert.deepEqual(seqs, seqs.map((_, i) => i + 1));
    assert.ok((await page.evaluate(() => window.shifts)) < 0.01, `layout shift: ${await page.evaluate(() => window.shifted.join(', '))}`);
    await close();
  });

  test('is cancelled', async () => {
    const { page, close } = await open('/');
    await page.locator('.balance').waitFor();
    await page.locator('#examples button[data-example="command"]').click();
    await page.locator('#command').fill('sleep 60');
    await page.locator('#go').click();
    await page.locator('.event[data-type="worker.started"]').waitFor();
    await page.locator('.actions .danger').click();
    await page.locator('.event[data-type="cancelled"]').waitFor();
    await lastRow(page).waitFor();
    await picture(page, 'run-cancelled');
    await accessible(page);
    await close();
  });

  test('ends when its budget does', async () => {
    const run = await finished({ command: 'sleep 60', max_cost_micros: 400, timeout_seconds: 60 });
    assert.equal(run.state, 'budget_exhausted');
    assert.equal(run.money.charged_micros, 400);
    const { page, close } = await open(`/runs/${run.id}`);
    await lastRow(page).waitFor();
    assert.equal(await page.locator('.run-head .state').textContent(), 'Budget exhausted');
    assert.equal(await page.locator('.bar').getAttribute('aria-valuenow'), '400');
    assert.equal(await page.locator('.bar').getAttribute('aria-valuemax'), '400');
    assert.match(await page.locator('.event[data-type="budget_exhausted"]').innerText(), /budget cannot pay/);
    await picture(page, 'run-budget-exhausted');
    await accessible(page);
    await close();
  });

  test('shows hostile output as text', async () => {
    const run = await finished({ prompt: 'be hostile', model: 'replay/hostile' });
    assert.equal(run.state, 'succeeded');
    const { page, close } = await open(`/runs/${run.id}`);
    await lastRow(page).waitFor();
    for (const summary of await page.locator('.event summary').all()) await summary.click();
    const shown = await page.locator('.timeline').innerText();
    assert.ok(shown.includes('<script>document.title="owned"</script><img src=x onerror="document.title=1"><b>bold</b> &amp; &#60;'));
    assert.ok(shown.includes('\\x1b[31mred\\x1b[0m') && shown.includes('\\x07') && shown.includes('\\x0d') && shown.includes('\\x08'));
    assert.ok(shown.includes('U+202E') && shown.includes('U+200B') && !/[\u202e\u200b\u001b]/.test(shown));
    assert.match(await page.title(), /^Run/);
    assert.equal(await page.locator('.timeline :is(script, img, iframe, b, style, object)').count(), 0);
    assert.equal(await page.locator('.result a').evaluateAll((all) => all.map((a) => a.href).join()), 'https://example.com/x.png,https://example.com/');
    const long = page.locator('.event[data-type="shell"] .output-box').nth(3);
    assert.match(await long.innerText(), /5MB/);
    assert.ok((await long.locator('pre').textContent()).length <= 16384);
    assert.ok(await page.evaluate(() => document.documentElement.scrollWidth <= innerWidth));
    await page.screenshot({ path: join(screens, 'run-hostile.png'), fullPage: true });
    await accessible(page);
    await close();

    // A command's own output, five megabytes on one line.
    const flood = await finished({ command: "head -c 5000000 /dev/zero | tr '\\0' 'x'" });
    const second = await open(`/runs/${flood.id}`, { width: 360, height: 740 });
    await lastRow(second.page).waitFor();
    assert.ok(await second.page.evaluate(() => document.documentElement.scrollWidth <= innerWidth));
    assert.match(await second.page.locator('.result').innerText(), /x{1000}/);
    await second.close();
  });

  test('with ten thousand events stays smooth', async () => {
    const run = await finished({ command: 'true' });
    const events = await api(server, 'GET', `/v1/runs/${run.id}/events`);
    // Only the number of the events is made up: the page gets the run's own ones many times over.
    const shell = events.events.find((e) => e.type === 'shell');
    const many = [...events.events.slice(0, 3), ...Array.from({ length: 10_000 }, (_, i) => ({ ...shell, at_ms: shell.at_ms + i / 10 })), ...events.events.slice(-3).map((e) => ({ ...e, at_ms: shell.at_ms + 1001 }))].map((e, i) => ({ ...e, seq: i + 1 }));
    const { page, close } = await open('/');
    await page.route(`**/v1/runs/${run.id}/events?*`, (route) => route.fulfill({ json: { events: many } }));
    await page.evaluate((id) => { location.hash = id; location.reload(); }, run.id);
    await page.waitForFunction((n) => document.querySelectorAll('.event').length === n, many.length);
    await page.locator('.replay input[type=range]').fill('500');
    await page.locator('.replay input[value="Infinity"] + span').click();
    await page.evaluate(() => scrollTo(0, document.documentElement.scrollHeight));
    await lastRow(page).waitFor();
    // One frame of scrolling through it, laid out and painted.
    const frame = await page.evaluate(async () => {
      const times = [];
      for (let i = 0; i < 20; i++) {
        const began = performance.now();
        scrollTo(0, document.documentElement.scrollHeight * (i / 20));
        await new Promise((r) => requestAnimationFrame(() => requestAnimationFrame(r)));
        times.push(performance.now() - began);
      }
      return times.sort((a, b) => a - b)[10];
    });
    console.log(`median time of two frames while scrolling through ${many.length} events: ${frame.toFixed(0)} ms`);
    await close();
  });

  test('of a kind that is not known yet is shown all the same', async () => {
    const run = await finished({ command: 'true' });
    const events = await api(server, 'GET', `/v1/runs/${run.id}/events`);
    events.events.splice(3, 0, { seq: 3.5, run: run.id, type: 'future.thing', at_ms: events.events[3].at_ms, data: { note: '<b>x</b>' } });
    const { page, close } = await open('/');
    await page.route(`**/v1/runs/${run.id}/events?*`, (route) => route.fulfill({ json: events }));
    await page.evaluate((id) => { location.hash = id; location.reload(); }, run.id);
    const row = page.locator('.event[data-type="future.thing"]');
    await row.locator('summary').click();
    assert.match(await row.innerText(), /future\.thing/);
    assert.match(await row.innerText(), /<b>x<\/b>/);
    await close();
  });

  test('is shared by a link that expires and can be revoked', async () => {
    const run = await finished({ command: 'echo shared output' });
    const { page, close } = await open(`/runs/${run.id}`);
    await page.locator('.actions button').click();
    await page.locator('dialog .primary').click();
    const address = await page.locator('dialog input').inputValue();
    await accessible(page);
    await picture(page, 'share');
    const visitor = await open(address.slice(server.url.length), { key: '', faults: ['401'] });
    await lastRow(visitor.page).waitFor();
    assert.match(await visitor.page.locator('.result').innerText(), /shared output/);
    assert.equal(await visitor.page.locator('.actions button').count(), 0);
    await accessible(visitor.page);
    await page.locator('dialog li .danger').click();
    await page.locator('dialog li.hint').waitFor();
    await visitor.page.reload();
    await visitor.page.locator('.problem').waitFor();
    await visitor.close();
    await close();
  });
});

describe('connections', () => {
  test('the billing example fetches, adds up, and is refused what it may not do', async () => {
    await server.connected('billing');
    const { page, close } = await open('/', { scheme: 'dark' });
    await page.locator('.balance').waitFor();
    await page.locator('#examples button[data-example="billing"]').click();
    await page.locator('#go').click();
    await lastRow(page).waitFor();
    const result = await page.locator('.result').innerText();
    assert.match(result, /Birch & Sons\s+540\.45/);
    assert.match(result, /Aster Books\s+310\.05/);
    assert.match(result, /Cedar Café\s+290\.00/);
    assert.match(result, /inv-1003, due 2026-09-12/);
    assert.match(result, /method_not_allowed/);
    const calls = page.locator('.event[data-type="connection"]');
    assert.equal(await calls.count(), 3); // one by the agent, two by its program
    assert.match(await calls.first().innerText(), /GET billing.*\n?.*200/s);
    assert.match(await page.locator('.event[data-type="broker.refused"]').innerText(), /method_not_allowed/);
    await page.screenshot({ path: join(screens, 'connection-billing.png'), fullPage: true });
    await accessible(page);
    await close();
  });

  test('the database example reads and cannot write', async () => {
    await server.connected('warehouse');
    const { page, close } = await open('/', { width: 360, height: 780 });
    await page.locator('.balance').waitFor();
    await page.locator('#examples button[data-example="warehouse"]').click();
    await page.locator('#go').click();
    await lastRow(page).waitFor();
    const result = await page.locator('.result').innerText();
    assert.match(result, /Standing desk\s+\d+\s+\d+\.\d\d/);
    assert.match(result, /sql_not_allowed/);
    assert.equal(await page.locator('.event[data-type="connection"]').count(), 2);
    assert.equal(await page.locator('.event[data-type="shell"]').count(), 0);
    assert.ok(await page.evaluate(() => document.documentElement.scrollWidth <= innerWidth));
    await page.screenshot({ path: join(screens, 'connection-warehouse.png'), fullPage: true });
    await close();
  });
});

describe('the playground', () => {
  test('plays the examples that need no connection as they are shown', async () => {
    const { page, close } = await open('/');
    await page.locator('.balance').waitFor();
    for (const [example, state, result] of [['csv-analysis', 'Succeeded', /north,533\.20/], ['budget', 'Budget exhausted', /Still two/], ['command', 'Succeeded', /Could not resolve host/]]) {
      await page.locator(`#examples button[data-example="${example}"]`).click();
      const before = await page.locator('.run-id').allTextContents();
      await page.locator('#go').click();
      await page.waitForFunction((b) => ![b, undefined].includes(document.querySelector('.run-id')?.textContent), before[0]);
      await lastRow(page).waitFor();
      assert.equal(await page.locator('.run-head .state').textContent(), state, example);
      assert.match(await page.locator('.result').innerText(), result, example);
    }
    await close();
  });

  test('refuses a wrong key and forgets it', async () => {
    const { page, close } = await open('/', { key: '', faults: ['401'] });
    await page.locator('.event').first().waitFor(); // the recorded run
    await page.locator('#signin-key').fill('eph_wrong');
    await page.locator('#signin-key').press('Enter');
    await page.locator('#signin-error:not(:empty)').waitFor();
    assert.equal(await page.locator('#signin-error').textContent(), 'This key is not valid.');
    assert.equal(await page.locator('#signin-key').getAttribute('aria-invalid'), 'true');
    assert.equal(await page.evaluate(() => sessionStorage.getItem('ephemeral-key')), null);
    await picture(page, 'wrong-key');
    await accessible(page);
    await page.locator('#signin-key').fill(server.key);
    await page.locator('#signin-form button').click();
    await page.locator('.balance').waitFor();
    assert.deepEqual(await page.evaluate(() => [Object.keys(localStorage), document.cookie]), [[], '']);
    await close();
  });

  test('lets a visitor create an account, shows the key once, and runs with it', async () => {
    const { page, close } = await open('/', { key: '', language: 'de', width: 360, height: 780, faults: ['400', '429', 'ERR_FAILED'] });
    await page.locator('#signup-form').waitFor();
    await page.locator('#signup-form button').click();
    await page.locator('#signup-name[aria-invalid=true]').waitFor();
    await page.locator('#signup-name').fill('Besuch');
    await picture(page, 'signup');
    await accessible(page);
    // The first answer is lost: the same sign-up is sent again, and not another one.
    const keys = [];
    await page.route('**/v1/signup', (route) => {
      if (route.request().method() !== 'POST') return route.continue();
      keys.push(route.request().headers()['idempotency-key']);
      return keys.length === 1 ? route.abort() : route.continue();
    });
    await page.locator('#signup-form button').click();
    await page.locator('#signup-error:not(:empty)').waitFor();
    await page.locator('#signup-form button').click();
    await page.locator('#signup-made').waitFor();
    assert.ok(keys.length === 2 && keys[0] === keys[1] && keys[0].length > 20, keys.join());
    const secret = await page.locator('.secret').textContent();
    assert.match(secret, /^eph_/);
    assert.equal(await page.evaluate(() => sessionStorage.getItem('ephemeral-key')), null); // not before its owner has it
    await picture(page, 'signup-key');
    await accessible(page);
    await page.locator('#signup-made button.primary').click();
    await page.locator('.balance').waitFor();
    assert.match(await page.locator('.balance').textContent(), /0,25/);
    assert.ok(!(await page.locator('body').innerText()).includes(secret));
    await page.locator('#examples button[data-example="command"]').click();
    await page.locator('#go').click();
    await lastRow(page).waitFor();
    const account = await api(server, 'GET', '/v1/account', undefined, secret);
    assert.equal(account.deposits_micros, 250_000);
    await close();
    const second = await open('/', { key: '', faults: ['429'] }); // one a day from one address
    await second.page.locator('#signup-name').fill('Again');
    await second.page.locator('#signup-form button').click();
    await second.page.locator('#signup-error:not(:empty)').waitFor();
    assert.match(await second.page.locator('#signup-error').textContent(), /from your address/);
    await second.close();
  });

  test('says at each field what the server finds wrong', async () => {
    const { page, close } = await open('/', { language: 'ja', faults: ['400', '402'] });
    await page.locator('.balance').waitFor();
    await page.locator('#model').fill('nobody/nothing');
    await page.locator('#connections').fill('no-such-connection');
    await page.locator('#timeout').fill('4000');
    await page.locator('#add-file').click();
    await page.locator('.file input').fill('../outside');
    await page.locator('#go').click();
    for (const field of ['model', 'connections', 'timeout_seconds', 'files']) {
      await page.locator(`[data-field="${field}"] .error`).waitFor();
      assert.equal(await page.locator(`[data-field="${field}"] [aria-invalid=true]`).count(), 1, field);
      assert.doesNotMatch(await page.locator(`[data-field="${field}"] .error`).innerText(), /[a-z]{2,} [a-z]{2,}/); // no English
    }
    await picture(page, 'field-errors');
    await accessible(page);
    await page.locator('.file .danger').click();
    await page.locator('#model').fill('');
    await page.locator('#connections').fill('');
    await page.locator('#timeout').fill('30');
    assert.equal(await page.locator('[data-field="timeout_seconds"] .error').count(), 0); // what is changed is no longer marked
    await page.locator('#budget').fill('90');
    await page.locator('#go').click();
    await page.locator('[data-field="max_cost_micros"] .error').waitFor();
    assert.equal(await page.locator('#request .error').count(), 1); // the earlier marks are gone
    await close();
  });

  test('gives programs that send what it sends', { timeout: 120_000 }, async () => {
    const { page, close } = await open('/');
    await page.locator('.balance').waitFor();
    await page.locator('#examples button[data-example="command"]').click();
    await page.locator('#command').fill('printf \'%s\\n\' "quotes \' and `ticks` and """ three" $HOME');
    await page.locator('#add-file').click();
    await page.locator('.file input').fill('a"b.txt');
    await page.locator('.file textarea').fill('line\nJSON\n\'\'\' """ ` \\ é 日本\n');
    const posted = page.waitForRequest((r) => r.method() === 'POST');
    await page.locator('#go').click();
    const sent = JSON.parse((await posted).postData());
    await lastRow(page).waitFor();
    const dir = await mkdtemp(join(tmpdir(), 'eph-snippet-'));
    const run = promisify(execFile);
    const env = { ...process.env, EPHEMERAL_URL: server.url, EPHEMERAL_API_KEY: server.key };
    const newest = async () => (await api(server, 'GET', '/v1/runs?limit=1')).runs[0].id;
    const check = async (before) => {
      const id = await newest();
      assert.notEqual(id, before);
      const { request } = await api(server, 'GET', `/v1/runs/${id}`);
      for (const name of Object.keys(sent)) assert.deepEqual(request[name], sent[name], name);
    };
    for (const [kind, program] of [['curl', 'bash'], ['python', 'python3']]) {
      await page.locator(`#snippets input[value="${kind}"] + span`).click();
      const before = await newest();
      const code = (await page.locator('.snippet').textContent()).replace('$(uuidgen)', 'snippet-of-the-test');
      await run(program, ['-c', code], { env, cwd: dir });
      await check(before);
    }
    await page.locator('#snippets input[value="go"] + span').click();
    const inside = await mkdtemp(join(repo, 'build', 'snippet-'));
    await writeFile(join(inside, 'main.go'), await page.locator('.snippet').textContent());
    const before = await newest();
    await run('go', ['run', '-buildvcs=false', join(inside, 'main.go')], { env, cwd: repo });
    await check(before);
    await rm(dir, { recursive: true });
    await rm(inside, { recursive: true });
    await close();
  });

  test('works with the keyboard alone', async () => {
    const { page, close } = await open('/', { key: '' });
    await page.locator('#examples button').first().waitFor();
    await page.keyboard.press('Tab');
    assert.equal(await page.evaluate(() => document.activeElement.className), 'skip');
    await page.keyboard.press('Enter');
    const until = async (match) => {
      for (let i = 0; i < 60; i++) {
        if (await page.evaluate((m) => document.activeElement.matches(m), match)) return;
        await page.keyboard.press('Tab');
      }
      throw new Error(`the keyboard does not reach ${match}`);
    };
    await until('#signin-key');
    await page.keyboard.type(server.key);
    await page.keyboard.press('Enter');
    await page.locator('.balance').waitFor();
    await page.evaluate(() => document.getElementById('main').focus());
    await until('button[data-example="command"]');
    await page.keyboard.press('Space');
    await until('#go');
    const seen = await page.evaluate(() => { const s = getComputedStyle(document.activeElement); return s.outlineStyle !== 'none' && parseFloat(s.outlineWidth) > 0; });
    assert.ok(seen, 'the focus cannot be seen');
    await page.keyboard.press('Enter');
    await lastRow(page).waitFor();
    await page.locator('.replay:not(.idle)').waitFor();
    await until('.event summary');
    await page.keyboard.press('Enter');
    await page.locator('.event details[open] .output').first().waitFor();
    await page.evaluate(() => document.querySelector('.replay input[type=range]').focus());
    await page.keyboard.press('Home');
    assert.deepEqual(await rows(page), ['queued']);
    await close();
  });
});

describe('operations', () => {
  test('shows the pool, predicts another size, and resizes', async () => {
    const { page, close } = await open('/ops', { key: server.adminKey });
    await page.locator('.pool[aria-label^="base"]').waitFor();
    await page.waitForFunction(() => Number(document.querySelector('[data-gauge="ready"]')?.textContent) > 0);
    // The history is the node's, so a page that was just opened has one: the server has been there for longer than two looks.
    await page.waitForFunction(() => (document.querySelector('svg.history path.ready')?.getAttribute('d').match(/L/g) ?? []).length >= 2);
    await page.locator('.resize button:not(.primary)').click();
    await page.locator('.pool dl[aria-live] dd').first().waitFor();
    await page.locator('.resize input').first().fill('3');
    await page.locator('.resize button.primary').click();
    await page.locator('.resize .hint:not(:empty)').waitFor();
    const { pools } = await api(server, 'GET', '/v1/pools', undefined, server.adminKey);
    assert.equal(pools[0].policy.min_ready, 3);
    // What the node reports of its machines, and the queue: one run at work, more than there are machines behind it.
    const runs = await Promise.all(Array.from({ length: 7 }, () => api(server, 'POST', '/v1/runs', { command: 'sleep 30', timeout_seconds: 60 })));
    const queue = page.locator(`[data-org="${server.org}"] td`);
    await page.waitForFunction((org) => { const cells = [...document.querySelectorAll(`[data-org="${org}"] td`)].map((cell) => Number(cell.textContent)); return cells[0] >= 1 && cells[3] >= 1; }, server.org);
    assert.equal(Number(await queue.nth(0).textContent()) + Number(await queue.nth(3).textContent()), 7);
    for (const what of ['claim', 'restore']) {
      await page.locator(`[data-latency="${what}"]`).waitFor();
      assert.ok(Number(await page.locator(`[data-latency="${what}"] td`).last().textContent()) >= 1, what);
    }
    await accessible(page);
    await page.screenshot({ path: join(screens, 'operations.png'), fullPage: true });
    await page.setViewportSize({ width: 360, height: 780 });
    assert.ok(await page.evaluate(() => document.documentElement.scrollWidth <= innerWidth));
    for (const { id } of runs) await api(server, 'POST', `/v1/runs/${id}/cancel`);
    await page.locator('.queues .hint:not(:empty)').waitFor();
    await close();
  });
});

let looked; // the run that is looked at

describe('how it looks', () => {
  for (const [width, scheme] of [[360, 'light'], [360, 'dark'], [1600, 'light'], [1600, 'dark']]) {
    test(`${width} pixels wide and ${scheme}`, async () => {
      looked ??= await finished(sandboxProof);
      const run = looked;
      for (const [name, path, key] of [['playground', '/', server.key], ['welcome', '/', ''], ['run', `/runs/${run.id}`, server.key]]) {
        const { page, close } = await open(path, { key, width, height: width < 500 ? 780 : 1000, scheme });
        await page.locator(name === 'playground' ? '.balance' : '.event').first().waitFor();
        if (name === 'run') await lastRow(page).waitFor();
        assert.ok(await page.evaluate(() => document.documentElement.scrollWidth <= innerWidth), `${name} is wider than the window`);
        const sent = await page.evaluate(() => {
          const painted = performance.getEntriesByName('first-contentful-paint')[0].startTime;
          return [...performance.getEntriesByType('navigation'), ...performance.getEntriesByType('resource')].filter((e) => e.responseStart <= painted).reduce((sum, e) => sum + e.transferSize, 0);
        });
        assert.ok(sent > 0 && sent < 100_000, `${sent} bytes before ${name} is painted first`);
        console.log(`${name} in ${width} pixels: ${sent} bytes before the first paint`);
        await accessible(page);
        await page.screenshot({ path: join(screens, `${name}-${width}-${scheme}.png`), fullPage: true });
        await close();
      }
    });
  }
});

describe('recorded events', () => {
  test('of the web, of a budget that is nearly used up and of dropped packets are shown', async () => {
    const run = await finished({ command: 'true' });
    const events = await api(server, 'GET', `/v1/runs/${run.id}/events`);
    const { at_ms } = events.events[3];
    events.events.splice(3, 0,
      { seq: 3.2, run: run.id, type: 'web', at_ms, data: { kind: 'fetch', method: 'GET', target: 'https://example.com/<i>', status: 200, bytes: 12, duration_ms: 40, charged_micros: 90_000 } },
      { seq: 3.4, run: run.id, type: 'web', at_ms, data: { kind: 'search', target: 'weather', status: 0, bytes: 0, duration_ms: 40, charged_micros: 0, error: 'no <b>answer</b>' } },
      { seq: 3.6, run: run.id, type: 'budget.warning', at_ms, data: { reserved_micros: 100_000, charged_micros: 90_000, pending_micros: 0 } });
    Object.assign(events.events.find((e) => e.type === 'microvm.destroyed').data, { dropped_packets: 3, dropped_bytes: 180 });
    const { page, close } = await open('/');
    await page.route(`**/v1/runs/${run.id}/events?*`, (route) => route.fulfill({ json: events }));
    await page.evaluate((id) => { location.hash = id; location.reload(); }, run.id);
    await lastRow(page).waitFor();
    const web = page.locator('.event[data-type="web"]');
    assert.equal(await web.count(), 2);
    assert.match(await web.first().innerText(), /GET https:\/\/example\.com\/<i>[^]*200[^]*\$0\.09/);
    assert.match(await web.last().innerText(), /weather[^]*no <b>answer<\/b>/);
    assert.match(await page.locator('.event[data-type="budget.warning"]').innerText(), /\$0\.09\d* of \$0\.1/);
    assert.match(await page.locator('.event[data-type="microvm.destroyed"] .dropped').innerText(), /3 packets[^]*180/);
    // The stages are those of the record, in its order, and none without a time.
    assert.deepEqual(await page.locator('.stages dt').evaluateAll((all) => all.map((e) => e.dataset.stage)), run.stages.map((s) => s.name));
    assert.equal(await page.locator('.stages dd', { hasText: '–' }).count(), 0);
    await accessible(page);
    await close();
  });
});
