// Plays an ended run again, from the recorded times.

import { h } from './dom.js';
import { clock, t } from './i18n.js';

const speeds = [1, 2, 8];

// Replay is the row of controls. show(ms) shows the run as it was then; Infinity shows all of it.
export class Replay {
  #at = 0;
  #end = 0;
  #speed = Infinity;
  #playing = false;
  #before = 0;

  constructor(show) {
    this.show = show;
    this.play = h('button', { type: 'button', class: 'play', on: { click: () => this.#toggle() } });
    this.place = h('input', { type: 'range', min: '0', max: '0', value: '0', step: '1', 'aria-label': t('replay.place'), on: { input: () => this.#seek(Number(this.place.value)) } });
    this.time = h('output', { class: 'replay-time' });
    this.choices = [...speeds, Infinity].map((speed) => {
      const name = speed === Infinity ? t('replay.once') : t('replay.speed', { speed });
      return h('label', {}, h('input', { type: 'radio', name: 'speed', value: String(speed), checked: speed === Infinity, on: { click: () => this.setSpeed(speed) } }), h('span', {}, name));
    });
    this.node = h('div', { class: 'replay', role: 'group', 'aria-label': t('replay.label') }, this.play,
      h('div', { class: 'replay-track' }, this.place), this.time,
      h('fieldset', { class: 'segmented small' }, h('legend', { class: 'sr' }, t('replay.speeds')), this.choices));
    this.#draw();
  }

  // setEnabled says whether there is something to replay; the row keeps its place either way.
  setEnabled(on) {
    for (const control of this.node.querySelectorAll('button, input')) control.disabled = !on;
    this.node.classList.toggle('idle', !on);
  }

  // load makes a run of that length playable; it is shown whole at first.
  load(end) {
    this.#end = end;
    this.#at = end;
    this.#playing = false;
    this.place.max = String(Math.ceil(end));
    this.#draw();
  }

  // setSpeed plays from the start at a speed, or from where it stands if it stands in the middle.
  setSpeed(speed) {
    this.#speed = speed;
    for (const choice of this.choices) choice.firstChild.checked = choice.firstChild.value === String(speed);
    if (speed === Infinity) {
      this.#playing = false;
      this.#at = this.#end;
      this.show(Infinity);
      this.#draw();
    } else if (!this.#playing) {
      if (this.#at >= this.#end) this.#at = 0;
      this.#start();
    }
  }

  stop() { this.#playing = false; this.#draw(); }

  #toggle() {
    if (this.#playing) return this.stop();
    if (this.#at >= this.#end) this.#at = 0;
    if (this.#speed === Infinity) return this.setSpeed(1);
    this.#start();
  }

  #seek(at) {
    this.#at = at;
    this.show(at);
    this.#draw();
  }

  #start() {
    this.#playing = true;
    this.#before = performance.now();
    this.show(this.#at);
    this.#draw();
    requestAnimationFrame((now) => this.#step(now));
  }

  #step(now) {
    if (!this.#playing) return;
    this.#at = Math.min(this.#end, this.#at + Math.max(0, now - this.#before) * this.#speed);
    this.#before = now;
    if (this.#at >= this.#end) this.#playing = false;
    this.show(this.#playing ? this.#at : Infinity);
    this.#draw();
    if (this.#playing) requestAnimationFrame((next) => this.#step(next));
  }

  #draw() {
    this.play.setAttribute('aria-label', t(this.#playing ? 'replay.pause' : 'replay.play'));
    this.play.title = t(this.#playing ? 'replay.pause' : 'replay.play');
    this.play.classList.toggle('playing', this.#playing);
    this.place.value = String(Math.round(this.#at));
    const text = t('replay.time', { at: clock(this.#at), end: clock(this.#end) });
    this.place.setAttribute('aria-valuetext', text);
    this.time.textContent = text;
  }
}
