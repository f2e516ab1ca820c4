// The memory of every pipeline rank over the step; below the curve of the rank that is chosen, what comes and goes.
"use strict";
const hue = rank => `hsl(${210 + 130 * rank / Math.max(1, plan.pp - 1)} 65% 52%)`;

function drawMemory() {
  const high = 260, sheet = canvas("memory", high + AXIS), {pen, x, room, width} = sheet;
  const top = peak.level > 0.4 * plan.memory ? Math.max(plan.memory, peak.level) : peak.level;
  const y = nbytes => high - nbytes / (1.08 * top) * (high - 6);
  const unit = top >= GiB ? GiB : 2 ** 20, step = ticks(top / unit, 3.2 * high);
  timeAxis(sheet, 0, high);
  pen.textAlign = "right";
  for (let n = 0; n * unit <= 1.04 * top; n += step) {
    pen.fillStyle = colour("rule");
    pen.fillRect(LEFT, y(n * unit), room, 1);
    pen.fillStyle = colour("dim");
    pen.fillText(`${+n.toFixed(3)} ${unit === GiB ? "GiB" : "MiB"}`, LEFT - 8, y(n * unit));
  }
  pen.save();
  pen.beginPath();
  pen.rect(LEFT, 0, room, high);
  pen.clip();
  area(sheet, y, ranks[chosen], high);
  for (let rank = 0; rank < plan.pp; rank++) if (rank !== chosen) curve(sheet, y, rank, plan.pp > 16 ? 0.6 : 1);
  curve(sheet, y, chosen, 2.25);
  if (plan.memory <= top) edge(sheet, y(plan.memory), `${plan.device}: ${size(plan.memory)}`);
  pen.fillStyle = colour("ink");
  pen.beginPath();
  pen.arc(x(peak.moment), y(peak.level), 4, 0, 7);
  pen.fill();
  pen.restore();
  if (peak.moment < view.from || peak.moment > view.to) return;
  const said = `peak ${size(peak.level)}` + (plan.pp > 1 ? `, rank ${peak.rank}` : "") + `, ${plan.moments[peak.rank]}`, half = pen.measureText(said).width / 2 + 5;
  const at = clamp(x(peak.moment), LEFT + half, width - RIGHT - half), down = y(peak.level) + 17;
  pen.fillStyle = colour("paper");
  pen.globalAlpha = 0.85;
  pen.fillRect(at - half, down - 9, 2 * half, 18);
  pen.globalAlpha = 1;
  pen.fillStyle = colour("ink");
  pen.textAlign = "center";
  pen.fillText(said, at, down);
}

function edge({pen, room}, y, said) {
  pen.strokeStyle = pen.fillStyle = colour("alarm");
  pen.setLineDash([4, 3]);
  pen.beginPath();
  pen.moveTo(LEFT, y);
  pen.lineTo(LEFT + room, y);
  pen.stroke();
  pen.setLineDash([]);
  pen.textAlign = "left";
  pen.fillText(said, LEFT + 6, y - 9);
}

// The points of a rank's memory; of those in one column of pixels the first, the lowest, the highest and the last.
function outline({x}, rank, visit) {
  const r = ranks[rank];
  let k = last(r.moment, view.from), column = x(view.from), level = levelAt(rank, view.from), low = level, high = level;
  const leave = () => [low, high, level].forEach(one => visit(column, one));
  for (k += 1; k < r.moment.length && r.moment[k] <= view.to; k++) {
    const at = x(r.moment[k]);
    if (at - column >= 0.5) {
      leave();
      visit(column = at, low = high = level);
    }
    level = r.level[k];
    low = Math.min(low, level);
    high = Math.max(high, level);
  }
  leave();
  visit(x(Math.min(view.to, plan.step)), level);
}

function curve(sheet, y, rank, wide) {
  const {pen} = sheet;
  pen.strokeStyle = hue(rank);
  pen.lineWidth = wide;
  pen.beginPath();
  outline(sheet, rank, (at, level) => pen.lineTo(at, y(level)));
  pen.stroke();
  pen.lineWidth = 1;
}

// Below the curve of the chosen rank: what it holds all the time, and above that what comes and goes.
function area(sheet, y, rank, high) {
  const {pen, x} = sheet, base = y(holding(chosen, 0)), right = x(Math.min(view.to, plan.step));
  pen.fillStyle = colour("wait");
  pen.fillRect(x(0), base, right - x(0), high - base);
  pen.fillStyle = hue(chosen);
  pen.globalAlpha = 0.22;
  pen.beginPath();
  pen.moveTo(x(view.from), base);
  outline(sheet, chosen, (at, level) => pen.lineTo(at, y(level)));
  pen.lineTo(right, base);
  pen.fill();
  pen.globalAlpha = 1;
}

const levelAt = (rank, t) => {
  const k = last(ranks[rank].moment, t);
  return k < 0 ? holding(rank, 0) : ranks[rank].level[k];
};

function filled(t) {
  const rest = holding(chosen, 0), comes = levelAt(chosen, t) - rest, who = plan.pp > 1 ? `rank ${chosen} ` : "";
  return `${who}at ${duration(t)}: ${size(comes + rest)}\n${size(comes)} that comes and goes, ${size(rest)} throughout`;
}
