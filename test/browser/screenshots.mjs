// Makes docs/timeline.png, and gateway/web/assets/recorded.json, from a real run of the example request.

import { readFile, writeFile } from 'node:fs/promises';
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { launch } from './browser.mjs';
import { api, startServer } from './server.mjs';

const repo = join(dirname(fileURLToPath(import.meta.url)), '..', '..');
const largest = 300_000; // bytes of the picture

const server = await startServer();
const browser = await launch();
try {
  const request = JSON.parse(await readFile(join(repo, 'docs', 'examples', 'sandbox-proof', 'request.json'), 'utf8'));
  const { id } = await api(server, 'POST', '/v1/runs', request);
  let run;
  do {
    run = await fetch(`${server.url}/v1/runs/${id}`, { headers: { Authorization: `Bearer ${server.key}`, Prefer: 'wait=30' } }).then((a) => a.json());
  } while (!run.ended_at);
  if (run.state !== 'succeeded') throw new Error(`the run ended ${run.state}: ${JSON.stringify(run.error)}`);
  const { events } = await api(server, 'GET', `/v1/runs/${id}/events`);
  if (!process.argv.includes('--picture')) {
    const recorded = { run: { ...run, org: '', node: '' }, events };
    await writeFile(join(repo, 'gateway', 'web', 'assets', 'recorded.json'), `${JSON.stringify(recorded, null, 1)}\n`);
  }

  const context = await browser.newContext({ viewport: { width: 1240, height: 1130 }, colorScheme: 'light', locale: 'en' });
  const page = await context.newPage();
  await page.addInitScript((key) => sessionStorage.setItem('ephemeral-key', key), server.key);
  await page.goto(`${server.url}/runs/${id}`);
  await page.locator('.event[data-type="worker.destroyed"]').waitFor();
  await page.locator('.event[data-type="shell"] summary').nth(1).click();
  await page.mouse.move(0, 0);
  await page.evaluate(() => document.activeElement.blur());
  const picture = await page.locator('.run').screenshot({ animations: 'disabled' });
  if (picture.length >= largest) throw new Error(`the picture has ${picture.length} bytes, want below ${largest}`);
  await writeFile(join(repo, 'docs', 'timeline.png'), picture);
} finally {
  await browser.close();
  await server.stop();
}
