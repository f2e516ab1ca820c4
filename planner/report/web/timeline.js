// The timeline of every pipeline rank: each micro-batch through each stage, and what follows them.
"use strict";
const BIN = 4;  // pixels; steps that are too short to see are drawn as shares of them, forward above backward
const TOP = 5;
const rowHeight = () => clamp(Math.floor(520 / plan.pp), 5, 30);

function drawTimeline() {
  const high = rowHeight(), rows = high * plan.pp, sheet = canvas("timeline", TOP + rows + AXIS), {pen, room} = sheet;
  const every = Math.ceil(14 / high);
  timeAxis(sheet, TOP, rows);
  for (let rank = 0; rank < plan.pp; rank++) {
    const top = TOP + rank * high;
    if (rank % every === 0) {
      pen.fillStyle = colour(rank === chosen ? "ink" : "dim");
      pen.textAlign = "right";
      pen.fillText(`rank ${rank}`, LEFT - 8, top + high / 2);
    }
    pen.save();
    pen.beginPath();
    pen.rect(LEFT, top, room, high - (high > 8 ? 2 : 1));
    pen.clip();
    drawRank(sheet, ranks[rank], top, high - (high > 8 ? 2 : 1));
    pen.restore();
  }
}

function drawRank({pen, x, room}, rank, top, high) {
  const ahead = new Float32Array(Math.ceil(room / BIN) + 1), back = new Float32Array(ahead.length);
  const [forward, backward, send, ink] = ["forward", "backward", "send", "ink"].map(colour);
  const until = x(rank.tails.length ? rank.tails.at(-1)[2] : plan.step);
  pen.fillStyle = colour("wait");
  pen.fillRect(x(0), top, Math.max(until, x(plan.step)) - x(0), high);
  const first = Math.max(0, last(rank.start, view.from)), widest = x(rank.longest) - x(0);
  for (let k = first; k < rank.start.length && rank.start[k] < view.to; k++) {
    const leg = rank.leg[k], left = x(rank.start[k]), right = x(rank.end[k]), wide = right - left;
    if (widest < 2.5) {
      cover(isBackward(leg) ? back : ahead, (left - LEFT) / BIN, (right - LEFT) / BIN);
      continue;
    }
    const chunk = Math.floor(stageOf(leg) / plan.pp), strong = chunks === 1 ? 1 : 1 - 0.6 * chunk / (chunks - 1);
    pen.globalAlpha = strong;
    pen.fillStyle = isBackward(leg) ? backward : forward;
    pen.fillRect(left, top, wide - (wide > 4 ? 0.75 : 0), high);
    pen.globalAlpha = 1;
    const said = String(rank.microbatch[k]);
    if (high >= 13 && wide > 6.5 * said.length + 5) {
      pen.textAlign = "center";
      pen.fillStyle = strong > 0.55 ? "#ffffff" : ink;
      pen.fillText(said, left + wide / 2, top + high / 2 + 0.5);
    }
    const sent = plan.blocking ? x(rank.end[k] + sending(leg)) - right : 0;
    pen.fillStyle = send;
    if (sent > 0.3) pen.fillRect(right - 0.75, top, sent, high);
  }
  for (let i = 0; i < ahead.length; i++) {
    pen.fillStyle = forward;
    if (ahead[i]) pen.fillRect(LEFT + i * BIN, top, BIN, high * Math.min(1, ahead[i]));
    pen.fillStyle = backward;
    if (back[i]) pen.fillRect(LEFT + i * BIN, top + high * (1 - Math.min(1, back[i])), BIN, high * Math.min(1, back[i]));
  }
  for (const [kind, start, end] of rank.tails) {
    pen.fillStyle = colour(kind);
    pen.fillRect(x(start), top, Math.max(0.5, x(end) - x(start)), high);
  }
}

// Add what lies between two places to the share of each bin that is covered.
function cover(shares, left, right) {
  for (let i = Math.max(0, Math.floor(left)); i < Math.min(right, shares.length); i++) {
    shares[i] += Math.min(right, i + 1) - Math.max(left, i);
  }
}

// Seconds in which what a step has made passes to the next stage.
function sending(leg) {
  const stage = stageOf(leg), after = isBackward(leg) ? stage - 1 : stage;
  return plan.transfer[after] || 0;
}

function doing(rank, t) {
  const r = ranks[rank], k = last(r.start, t), who = plan.pp > 1 ? `rank ${rank}: ` : "";
  const after = r.tails.find(([, start, end]) => start <= t && t <= end);
  if (after) return `${who}${plan.drawn[after[0]]}\n${duration(after[2] - after[1])}, from ${duration(after[1])}`;
  if (k < 0 || t > r.end[k]) {
    const sends = k >= 0 && plan.blocking && t <= r.end[k] + sending(r.leg[k]);
    return t < 0 || t > plan.step ? "" : `${who}${sends ? "sends" : "waits"}, ${duration(t)}`;
  }
  const leg = r.leg[k], stage = stageOf(leg), way = isBackward(leg) ? "backward" : "forward";
  return `${who}${way} of micro-batch ${count(r.microbatch[k])}` + (chunks > 1 ? `, chunk ${Math.floor(stage / plan.pp)}` : "") +
    `\n${duration(r.end[k] - r.start[k])}, from ${duration(r.start[k])}\n${plan.stages[stage].holds}` +
    (sending(leg) ? `\nthen sends for ${duration(sending(leg))}` + (plan.blocking ? "" : ", while it computes") : "");
}
