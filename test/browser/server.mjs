// A real server for the tests: `ephemeral serve` with a private Redis and real machines, an organisation and its keys.

import { execFile, spawn } from 'node:child_process';
import { chmod, mkdtemp, open, readFile, rm } from 'node:fs/promises';
import { createServer } from 'node:net';
import { tmpdir } from 'node:os';
import { dirname, join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { fileURLToPath } from 'node:url';
import { promisify } from 'node:util';

const here = dirname(fileURLToPath(import.meta.url));
const repo = join(here, '..', '..');
const binary = join(repo, 'build', 'ephemeral');
const startLimit = 240_000; // milliseconds: the making of a template included

async function freePort() {
  const server = createServer();
  await new Promise((resolve, reject) => server.once('error', reject).listen(0, '127.0.0.1', resolve));
  const { port } = server.address();
  await new Promise((resolve) => server.close(resolve));
  return port;
}

// startServer returns a server that is ready.
export async function startServer(settings = {}) {
  const data = await mkdtemp(join(tmpdir(), 'eph-browser-'));
  await chmod(data, 0o711); // machines run as other users, who have to pass through
  const port = await freePort();
  const env = {
    ...process.env,
    EPHEMERAL_DATA_DIR: join(data, 'data'),
    EPHEMERAL_IMAGE_DIR: process.env.EPHEMERAL_IMAGE_DIR || join(repo, 'build', 'images'),
    EPHEMERAL_LISTEN: `127.0.0.1:${port}`,
    EPHEMERAL_ADMIN_LISTEN: `127.0.0.1:${await freePort()}`,
    EPHEMERAL_URL: `http://127.0.0.1:${port}`,
    EPHEMERAL_REDIS_URL: '',
    EPHEMERAL_REPLAY_DIR: join(here, 'conversations'),
    EPHEMERAL_POOL_MAX_MACHINES: '4',
    EPHEMERAL_NODE_DRAIN: '2s',
    EPHEMERAL_SIGNUP: 'true',
    EPHEMERAL_SIGNUP_PER_DAY: '1',
    EPHEMERAL_CONNECTION_ALLOW: '127.77.0.1/32', // the example upstreams alone
    ...settings,
  };
  const logPath = join(data, 'serve.log');
  const log = await open(logPath, 'w');
  const child = spawn(binary, ['serve'], { env, stdio: ['ignore', log.fd, log.fd] });
  const ended = new Promise((resolve) => { child.once('exit', (code) => resolve(code)); });
  let over = false;
  ended.then(() => { over = true; });
  const cli = async (...args) => (await promisify(execFile)(binary, args, { env, maxBuffer: 64 << 20 })).stdout.trim();

  let upstreams;
  let upstreamsEnded;
  const server = {
    url: env.EPHEMERAL_URL,
    env,
    cli,
    log: () => readFile(logPath, 'utf8'),
    async stop() {
      if (upstreams) {
        upstreams.kill('SIGTERM');
        await upstreamsEnded;
      }
      if (!over) child.kill('SIGTERM');
      const code = await ended;
      await log.close();
      if (code !== 0) throw new Error(`the server ended with ${code}:\n${(await server.log()).slice(-4000)}`);
      await rm(data, { recursive: true, force: true });
    },
  };
  const limit = Date.now() + startLimit;
  for (;;) {
    if (over) throw new Error(`the server ended at its start:\n${await server.log()}`);
    if (Date.now() > limit) { child.kill('SIGKILL'); throw new Error(`the server was not ready in time:\n${await server.log()}`); }
    const ready = await fetch(`${server.url}/readyz`).then((a) => a.ok, () => false);
    if (ready) break;
    await sleep(100);
  }
  server.org = await cli('orgs', 'create', 'browser');
  server.key = await cli('keys', 'create', '--org', server.org, '--name', 'browser');
  await cli('orgs', 'credit', server.org, '5000000');
  // The same example upstreams that "make serve" starts.
  upstreams = spawn(join(repo, 'build', 'example-upstreams'), ['-ephemeral', binary, '-org', server.org, '-dir', join(data, 'database')], { env, stdio: ['ignore', log.fd, log.fd] });
  upstreamsEnded = new Promise((resolve) => { upstreams.once('exit', resolve); });
  server.connected = async (name) => {
    for (const until = Date.now() + 60_000; Date.now() < until; await sleep(200)) {
      if (JSON.parse(await cli('connections', 'list', server.org, '-o', 'json')).some((c) => c.name === name)) return;
    }
    throw new Error(`there is no connection ${name}:\n${await server.log()}`);
  };
  server.adminKey = await cli('keys', 'create', '--admin', '--name', 'browser').catch(() => '');
  return server;
}

// api calls the server with the member key.
export async function api(server, method, path, body, key = server.key) {
  const answer = await fetch(server.url + path, {
    method,
    headers: { Authorization: `Bearer ${key}`, ...(body && { 'Content-Type': 'application/json' }) },
    body: body && JSON.stringify(body),
  });
  const text = await answer.text();
  if (!answer.ok) throw new Error(`${method} ${path}: ${answer.status}: ${text}`);
  return text === '' ? null : JSON.parse(text);
}
