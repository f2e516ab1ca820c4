// Draw the timeline of every pipeline rank: the passes of each micro-batch, then the end of the step.
"use strict";
const BIN = 4;  // pixels; of passes that are too short to see, each bin shows the shares, forward above backward
const TOP = 5;
const rowHeight = () => clamp(Math.floor(520 / plan.pp), 5, 30);

function drawTimeline() {
  const high = rowHeight(), rows = high * plan.pp, drawing = canvas("timeline", TOP + rows + AXIS), {pen, room} = drawing;
  const every = Math.ceil(14 / high);
  timeAxis(drawing, TOP, rows);
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
    drawRank(drawing, ranks[rank], top, high - (high > 8 ? 2 : 1));
    pen.restore();
  }
}

function drawRank({pen, x, room}, rank, top, high) {
  const forwardShares = new Float32Array(Math.ceil(room / BIN) + 1), backwardShares = new Float32Array(forwardShares.length);
  const [forward, backward, send, ink] = ["forward", "backward", "send", "ink"].map(colour);
  const until = x(rank.endOfStep.length ? rank.endOfStep.at(-1)[2] : plan.step);
  pen.fillStyle = colour("wait");
  pen.fillRect(x(0), top, Math.max(until, x(plan.step)) - x(0), high);
  const first = Math.max(0, last(rank.start, view.from)), widest = x(rank.longest) - x(0);
  for (let k = first; k < rank.start.length && rank.start[k] < view.to; k++) {
    const pass = rank.pass[k], left = x(rank.start[k]), right = x(rank.end[k]), wide = right - left;
    if (widest < 2.5) {
      addShares(isBackward(pass) ? backwardShares : forwardShares, (left - LEFT) / BIN, (right - LEFT) / BIN);
      continue;
    }
    const chunk = Math.floor(stageOf(pass) / plan.pp), strong = chunks === 1 ? 1 : 1 - 0.6 * chunk / (chunks - 1);
    pen.globalAlpha = strong;
    pen.fillStyle = isBackward(pass) ? backward : forward;
    pen.fillRect(left, top, wide - (wide > 4 ? 0.75 : 0), high);
    pen.globalAlpha = 1;
    const number = String(rank.microbatch[k]);
    if (high >= 13 && wide > 6.5 * number.length + 5) {
      pen.textAlign = "center";
      pen.fillStyle = strong > 0.55 ? "#ffffff" : ink;
      pen.fillText(number, left + wide / 2, top + high / 2 + 0.5);
    }
    const sent = plan.blocking ? x(rank.end[k] + sendSeconds(pass)) - right : 0;
    pen.fillStyle = send;
    if (sent > 0.3) pen.fillRect(right - 0.75, top, sent, high);
  }
  for (let i = 0; i < forwardShares.length; i++) {
    pen.fillStyle = forward;
    if (forwardShares[i]) pen.fillRect(LEFT + i * BIN, top, BIN, high * Math.min(1, forwardShares[i]));
    pen.fillStyle = backward;
    if (backwardShares[i]) pen.fillRect(LEFT + i * BIN, top + high * (1 - Math.min(1, backwardShares[i])), BIN, high * Math.min(1, backwardShares[i]));
  }
  for (const [kind, start, end] of rank.endOfStep) {
    pen.fillStyle = colour(kind);
    pen.fillRect(x(start), top, Math.max(0.5, x(end) - x(start)), high);
  }
}

// Add the interval from left to right to the covered share of each bin.
function addShares(shares, left, right) {
  for (let i = Math.max(0, Math.floor(left)); i < Math.min(right, shares.length); i++) {
    shares[i] += Math.min(right, i + 1) - Math.max(left, i);
  }
}

// Return the seconds of the p2p send that follows this pass.
function sendSeconds(pass) {
  const stage = stageOf(pass), after = isBackward(pass) ? stage - 1 : stage;
  return plan.transfer[after] || 0;
}

// Return the text about what a rank does at time t.
function activityText(rank, t) {
  const r = ranks[rank], k = last(r.start, t), who = plan.pp > 1 ? `rank ${rank}: ` : "";
  const after = r.endOfStep.find(([, start, end]) => start <= t && t <= end);
  if (after) return `${who}${plan.drawn[after[0]]}\n${duration(after[2] - after[1])}, from ${duration(after[1])}`;
  if (k < 0 || t > r.end[k]) {
    const sends = k >= 0 && plan.blocking && t <= r.end[k] + sendSeconds(r.pass[k]);
    return t < 0 || t > plan.step ? "" : `${who}${sends ? "sends" : "waits"}, ${duration(t)}`;
  }
  const pass = r.pass[k], stage = stageOf(pass), direction = isBackward(pass) ? "backward" : "forward";
  return `${who}${direction} of micro-batch ${count(r.microbatch[k])}` + (chunks > 1 ? `, model chunk ${Math.floor(stage / plan.pp)}` : "") +
    `\n${duration(r.end[k] - r.start[k])}, from ${duration(r.start[k])}\n${plan.stages[stage].holds}` +
    (sendSeconds(pass) ? `\nthen sends for ${duration(sendSeconds(pass))}` + (plan.blocking ? "" : ", while it computes") : "");
}
