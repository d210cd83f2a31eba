// A line between browser and server that can be cut and mended.

import { connect, createServer } from 'node:net';

export async function startLine(target) {
  const { hostname, port } = new URL(target);
  const sockets = new Set();
  let whole = true;
  const server = createServer((near) => {
    if (!whole) return near.destroy();
    const far = connect(Number(port), hostname);
    for (const [a, b] of [[near, far], [far, near]]) {
      sockets.add(a);
      a.on('error', () => b.destroy());
      a.on('close', () => { sockets.delete(a); b.destroy(); });
      a.pipe(b);
    }
  });
  await new Promise((resolve, reject) => server.once('error', reject).listen(0, '127.0.0.1', resolve));
  const drop = () => { for (const socket of sockets) socket.destroy(); };
  return {
    url: `http://127.0.0.1:${server.address().port}`,
    cut() { whole = false; drop(); },
    mend() { whole = true; },
    close() { drop(); return new Promise((resolve) => server.close(resolve)); },
  };
}
