// Unpack the events, draw, and listen to the mouse and the keyboard.
"use strict";
async function begin() {
  ranks = await unpack();
  peak = ranks.map(rank => rank.most).reduce((a, b) => b.level > a.level ? b : a);
  chosen = peak.rank;
  const timeline = document.getElementById("timeline"), memory = document.getElementById("memory");
  const rowOf = event => clamp(Math.floor((event.offsetY - TOP) / rowHeight()), 0, plan.pp - 1);
  listen(timeline, (event, t) => event.offsetX < LEFT || event.offsetY > TOP + rowHeight() * plan.pp ? "" : activityText(rowOf(event), t));
  listen(memory, (event, t) => event.offsetX < LEFT ? "" : memoryText(clamp(t, 0, plan.step)));
  timeline.addEventListener("click", event => { chosen = rowOf(event); draw(); });
  for (const [id, factor] of [["in", 0.5], ["out", 2], ["whole", 1e9]]) {
    document.getElementById("zoom-" + id).addEventListener("click", () => zoom(factor));
  }
  window.addEventListener("resize", draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  draw();
  memory.dataset.peak = peak.level;
  timeline.dataset.drawn = ranks.reduce((n, rank) => n + rank.start.length, 0);
  timeline.dataset.ends = Math.max(...ranks.map(rank => rank.end.at(-1)));
}
begin();
