// Shared by all drawings: the page's data, the visible time range, canvases, and the box at the mouse.
// `plan` is the data: durations of passes in units of `plan.unit` seconds, everything else in seconds and bytes.
"use strict";
const plan = JSON.parse(document.getElementById("plan").textContent);
const tip = document.getElementById("tip");
const LEFT = 64, RIGHT = 12, AXIS = 22, GiB = 2 ** 30;
const stages = plan.stages.length, chunks = stages / plan.pp;
const view = {from: 0, to: plan.step};
let ranks = [], chosen = 0, peak = {level: 0};

const colour = name => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
const clamp = (x, low, high) => Math.min(Math.max(x, low), high);
const isBackward = pass => pass >= stages;
const stageOf = pass => isBackward(pass) ? 2 * stages - 1 - pass : pass;
const count = n => n.toLocaleString("en");

function duration(seconds) {
  if (seconds >= 1) return seconds.toFixed(3) + " s";
  return seconds >= 1e-3 ? (1e3 * seconds).toFixed(2) + " ms" : (1e6 * seconds).toFixed(1) + " µs";
}

function size(nbytes) {
  return nbytes >= GiB ? (nbytes / GiB).toFixed(1) + " GiB" : (nbytes / 2 ** 20).toFixed(1) + " MiB";
}

// Return the passes of each rank, from three compressed tables: pass, micro-batch, and the wait before it.
async function unpack() {
  const bytes = Uint8Array.from(atob(plan.events), c => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const numbers = new Int32Array(await new Response(stream).arrayBuffer());
  const n = numbers.length / 3 / plan.pp;
  const rows = (block, rank) => numbers.subarray((block * plan.pp + rank) * n, (block * plan.pp + rank + 1) * n);
  return Array.from({length: plan.pp}, (_, rank) => timed(rank, rows(0, rank), rows(1, rank), rows(2, rank)));
}

function timed(rank, pass, microbatch, wait) {
  const n = pass.length, start = new Float64Array(n), end = new Float64Array(n);
  const moment = new Float64Array(2 * (n + plan.updates[rank].length)), level = new Float64Array(moment.length);
  let now = 0, saved = 0, points = 0, most = {level: 0, moment: 0, rank};
  const hold = (at, transient) => {
    moment[points] = at;
    level[points] = holding(rank, transient);
    if (level[points] > most.level) most = {level: level[points], moment: at, rank};
    points++;
  };
  for (let k = 0; k < n; k++) {
    start[k] = (now += wait[k]) * plan.unit;
    end[k] = (now += plan.durations[pass[k]]) * plan.unit;
    const activations = plan.stages[stageOf(pass[k])].saved;
    hold(start[k], isBackward(pass[k]) ? saved + plan.tracks[rank].workspace : saved + activations);
    saved += isBackward(pass[k]) ? -activations : activations;
    hold(end[k], pass[k] === stages - 1 ? saved + plan.tracks[rank].loss : saved);
  }
  for (const [from, to] of plan.updates[rank]) {
    hold(from, plan.tracks[rank].optimizer);
    hold(to, 0);
  }
  const longest = Math.max(...[...new Set(pass)].map(one => plan.durations[one])) * plan.unit;
  return {pass, microbatch, start, end, moment, level, most, longest, endOfStep: plan.endOfStep[rank]};
}

// Return the memory of a rank with so many bytes of activations and transient memory (memory_timeline.py, Track.level).
function holding(rank, transient) {
  const {fixed, library} = plan.tracks[rank], variable = transient + library;
  return fixed + variable + Math.floor(plan.allocator * variable);
}

// Return the index of the last of these sorted numbers that is at most `x`; -1 if all are larger.
function last(numbers, x) {
  let low = 0, high = numbers.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (numbers[middle] <= x) low = middle + 1; else high = middle;
  }
  return low - 1;
}

function canvas(id, height) {
  const element = document.getElementById(id), sharp = window.devicePixelRatio || 1;
  element.style.height = height + "px";
  const width = element.clientWidth;
  element.width = Math.round(width * sharp);
  element.height = Math.round(height * sharp);
  const pen = element.getContext("2d");
  pen.scale(sharp, sharp);
  pen.font = "11px " + getComputedStyle(document.body).fontFamily;
  pen.textBaseline = "middle";
  const room = width - LEFT - RIGHT;
  return {pen, width, room, x: t => LEFT + (t - view.from) / (view.to - view.from) * room};
}

function ticks(span, room) {
  const rough = span / Math.max(2, room / 90), power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].find(n => n * power >= rough) * power;
}

function timeAxis({pen, x, room}, top, height) {
  const step = ticks(view.to - view.from, room), [unit, scale] = view.to - view.from >= 1 ? ["s", 1] : ["ms", 1e3];
  const digits = Math.max(0, -Math.floor(Math.log10(step * scale) + 1e-9));
  pen.textAlign = "center";
  for (let i = Math.ceil(view.from / step); i * step <= view.to; i++) {
    pen.fillStyle = colour("rule");
    pen.fillRect(x(i * step), top, 1, height);
    pen.fillStyle = colour("dim");
    const text = (i * step * scale).toFixed(digits), at = clamp(x(i * step), LEFT + 10, LEFT + room - 16);
    pen.fillText(i * step + step > view.to ? `${text} ${unit}` : text, at, top + height + 13);
  }
}

function draw() {
  drawTimeline();
  drawMemory();
}

function move(from, to) {
  const span = clamp(to - from, plan.step / 1e5, plan.step);
  view.from = clamp(from, 0, plan.step - span);
  view.to = view.from + span;
  draw();
}

function zoom(factor, at = (view.from + view.to) / 2) {
  move(at - (at - view.from) * factor, at + (view.to - at) * factor);
}

const timeAt = (element, event) =>
  view.from + (event.offsetX - LEFT) / (element.clientWidth - LEFT - RIGHT) * (view.to - view.from);

function show(event, text) {
  tip.hidden = !text;
  tip.textContent = text || "";
  const {offsetWidth: wide, offsetHeight: high} = tip;
  tip.style.left = Math.max(4, event.clientX + 14 + wide > innerWidth ? event.clientX - wide - 14 : event.clientX + 14) + "px";
  tip.style.top = Math.max(4, event.clientY + 14 + high > innerHeight ? event.clientY - high - 14 : event.clientY + 14) + "px";
}

function listen(element, describe) {
  let drag = null;
  element.addEventListener("pointerdown", event => drag = {x: event.offsetX, ...view, moved: false});
  window.addEventListener("pointerup", () => drag = null);
  element.addEventListener("pointerleave", event => show(event, ""));
  element.addEventListener("pointermove", event => {
    if (!drag) return show(event, describe(event, timeAt(element, event)));
    const by = (event.offsetX - drag.x) / (element.clientWidth - LEFT - RIGHT) * (drag.to - drag.from);
    move(drag.from - by, drag.to - by);
  });
  element.addEventListener("wheel", event => {
    if (!event.ctrlKey && !event.metaKey) return;  // the page scrolls
    event.preventDefault();
    zoom(1.0025 ** event.deltaY, timeAt(element, event));
  }, {passive: false});
  element.addEventListener("dblclick", event => zoom(0.25, timeAt(element, event)));
  element.addEventListener("keydown", event => {
    const span = view.to - view.from, by = {ArrowLeft: -0.1, ArrowRight: 0.1}[event.key];
    if (by) move(view.from + by * span, view.to + by * span);
    else if ("+-0".includes(event.key)) zoom({"+": 0.5, "-": 2, "0": 1e6}[event.key]);
    else return;
    event.preventDefault();
  });
}
