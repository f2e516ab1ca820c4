// Draw the memory of every pipeline rank over the step. Under the curve of the chosen rank, the area is filled.
"use strict";
const hue = rank => `hsl(${210 + 130 * rank / Math.max(1, plan.pp - 1)} 65% 52%)`;

function drawMemory() {
  const high = 260, drawing = canvas("memory", high + AXIS), {pen, x, room} = drawing;
  const top = peak.level > 0.4 * plan.memory ? Math.max(plan.memory, peak.level) : peak.level;
  const y = nbytes => high - nbytes / (1.08 * top) * (high - 6);
  const unit = top >= GiB ? GiB : 2 ** 20, step = ticks(top / unit, 3.2 * high);
  timeAxis(drawing, 0, high);
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
  area(drawing, y, ranks[chosen], high);
  for (let rank = 0; rank < plan.pp; rank++) if (rank !== chosen) curve(drawing, y, rank, plan.pp > 16 ? 0.6 : 1);
  curve(drawing, y, chosen, 2.25);
  if (plan.memory <= top) limit(drawing, y(plan.memory), `${plan.device}: ${size(plan.memory)}`);
  pen.fillStyle = colour("ink");
  pen.beginPath();
  pen.arc(x(peak.moment), y(peak.level), 4, 0, 7);
  pen.fill();
  pen.restore();
  if (peak.moment < view.from || peak.moment > view.to) return;
  label(drawing, y(peak.level) + 17);
}

// Write the peak memory and its moment below the peak; without the moment if that does not fit.
function label({pen, x, room, width}, middle) {
  const short = `peak ${size(peak.level)}` + (plan.pp > 1 ? `, rank ${peak.rank}` : "");
  const full = `${short}: ${plan.moments[peak.rank]}`, text = pen.measureText(full).width + 10 > room ? short : full;
  const half = pen.measureText(text).width / 2 + 5;
  const center = clamp(x(peak.moment), LEFT + half, width - RIGHT - half);
  pen.fillStyle = colour("paper");
  pen.globalAlpha = 0.85;
  pen.fillRect(center - half, middle - 9, 2 * half, 18);
  pen.globalAlpha = 1;
  pen.fillStyle = colour("ink");
  pen.textAlign = "center";
  pen.fillText(text, center, middle);
}

// Draw the memory of a device as a dashed line.
function limit({pen, room}, y, text) {
  pen.strokeStyle = pen.fillStyle = colour("alarm");
  pen.setLineDash([4, 3]);
  pen.beginPath();
  pen.moveTo(LEFT, y);
  pen.lineTo(LEFT + room, y);
  pen.stroke();
  pen.setLineDash([]);
  pen.textAlign = "left";
  pen.fillText(text, LEFT + 6, y - 9);
}

// Visit the points of a rank's memory curve: the first, lowest, highest and last point of each pixel column.
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

function curve(drawing, y, rank, wide) {
  const {pen} = drawing;
  pen.strokeStyle = hue(rank);
  pen.lineWidth = wide;
  pen.beginPath();
  outline(drawing, rank, (at, level) => pen.lineTo(at, y(level)));
  pen.stroke();
  pen.lineWidth = 1;
}

// Fill the area under the curve of the chosen rank: memory that stays in grey, transient memory in its colour.
function area(drawing, y, rank, high) {
  const {pen, x} = drawing, base = y(holding(chosen, 0)), right = x(Math.min(view.to, plan.step));
  pen.fillStyle = colour("wait");
  pen.fillRect(x(0), base, right - x(0), high - base);
  pen.fillStyle = hue(chosen);
  pen.globalAlpha = 0.22;
  pen.beginPath();
  pen.moveTo(x(view.from), base);
  outline(drawing, chosen, (at, level) => pen.lineTo(at, y(level)));
  pen.lineTo(right, base);
  pen.fill();
  pen.globalAlpha = 1;
}

const levelAt = (rank, t) => {
  const k = last(ranks[rank].moment, t);
  return k < 0 ? holding(rank, 0) : ranks[rank].level[k];
};

// Return the text about the memory of the chosen rank at time t.
function memoryText(t) {
  const fixed = holding(chosen, 0), transient = levelAt(chosen, t) - fixed, who = plan.pp > 1 ? `rank ${chosen} ` : "";
  return `${who}at ${duration(t)}: ${size(transient + fixed)}\n${size(fixed)} for the whole step, ${size(transient)} activations and transient memory`;
}
