// The distribution's Chromium, driven by Playwright.

import { access } from 'node:fs/promises';
import { chromium } from 'playwright-core';

const places = [process.env.CHROMIUM, '/usr/bin/chromium', '/usr/bin/chromium-browser', '/usr/bin/google-chrome'];

export async function launch() {
  for (const path of places.filter(Boolean)) {
    if (await access(path).then(() => true, () => false)) {
      // Its own sandbox needs a user that is not root, and the pages are our own.
      return chromium.launch({ executablePath: path, args: ['--no-sandbox', '--disable-dev-shm-usage'] });
    }
  }
  throw new Error('no Chromium: install the package chromium, or name the program in CHROMIUM');
}
