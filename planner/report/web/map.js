// Draw every device of every node in the colour of its process group along the chosen axis.
"use strict";
(() => {
  const {count: world, shown, perNode, axes} = plan.map, LABEL = 15, GAP = 10, INSET = 4;
  const element = document.getElementById("map");
  let axis = 0, under = -1;

  // A group's ranks are `stride` apart; the groups are counted in the order of their first ranks.
  const groupOf = (rank, {size, stride}) => Math.floor(rank / (size * stride)) * stride + rank % stride;
  const positionOf = (rank, {size, stride}) => Math.floor(rank / stride) % size;
  const firstOf = (rank, {size, stride}) => Math.floor(rank / (size * stride)) * size * stride + rank % stride;

  // Return the colour of a device: a gradient over pipeline ranks, distinct colours for the groups of other axes.
  function paint(rank) {
    const it = axes[axis];
    if (it.name === "pp") return `hsl(${210 + 130 * positionOf(rank, it) / Math.max(1, it.size - 1)} 60% 58%)`;
    const n = groupOf(rank, it), groups = world / it.size;
    return groups <= 12 ? `hsl(${360 * n / groups + 210} 58% 60%)` : `hsl(${(n * 137.508 + 210) % 360} 55% ${56 + 7 * (n % 3)}%)`;
  }

  // Return black or white, the more legible one on this colour (#rrggbb).
  function legible(hex) {
    const [red, green, blue] = hex.match(/\w\w/g).map(part => parseInt(part, 16));
    return 0.299 * red + 0.587 * green + 0.114 * blue > 140 ? "#1f2328" : "#ffffff";
  }

  // Return the size of a drawn device and of its node, so that all nodes fit.
  function plot() {
    const wide = element.clientWidth, nodes = Math.ceil(shown / perNode);
    const columns = [8, 9, 6, 4, 3, 2].find(n => perNode % n === 0 && n < perNode) || Math.min(perNode, 16), rows = Math.ceil(perNode / columns);
    for (const cell of [30, 24, 19, 15, 12, 9, 7, 5, 4]) {
      const gap = cell < 9 ? 4 : GAP, head = cell < 12 ? 0 : LABEL, width = columns * cell + 2 * INSET, height = rows * cell + 2 * INSET + head;
      const across = Math.max(1, Math.min(nodes, Math.floor((wide + gap) / (width + gap))));
      const high = Math.ceil(nodes / across) * (height + gap);
      if (high < 460 || cell === 4) return {cell, gap, head, width, height, across, high, columns, nodes};
    }
  }

  function placed(p, rank) {
    const node = Math.floor(rank / perNode), device = rank % perNode;
    return [
      node % p.across * (p.width + p.gap) + INSET + device % p.columns * p.cell,
      Math.floor(node / p.across) * (p.height + p.gap) + INSET + p.head + Math.floor(device / p.columns) * p.cell,
    ];
  }

  function drawMap() {
    const p = plot(), sharp = window.devicePixelRatio || 1;
    element.style.height = p.high + "px";
    element.width = Math.round(element.clientWidth * sharp);
    element.height = Math.round(p.high * sharp);
    const pen = element.getContext("2d");
    pen.scale(sharp, sharp);
    pen.font = "11px " + getComputedStyle(document.body).fontFamily;
    pen.textBaseline = "middle";
    for (let node = 0; node < p.nodes; node++) {
      const [x, y] = placed(p, node * perNode);
      pen.fillStyle = colour("soft");
      pen.strokeStyle = colour("rule");
      pen.beginPath();
      pen.roundRect(x - INSET + 0.5, y - INSET - p.head + 0.5, p.width - 1, p.height - 1, 4);
      pen.fill();
      pen.stroke();
      pen.fillStyle = colour("dim");
      pen.textAlign = "left";
      if (p.head) pen.fillText(p.width > 60 ? `node ${node}` : node, x, y - LABEL / 2 - 1);
    }
    const it = axes[axis], ours = under < 0 ? -1 : groupOf(under, it), space = p.cell > 8 ? 2 : 1;
    pen.textAlign = "center";
    for (let rank = 0; rank < shown; rank++) {
      const [x, y] = placed(p, rank), lit = ours < 0 || groupOf(rank, it) === ours;
      pen.globalAlpha = lit ? 1 : 0.22;
      pen.fillStyle = paint(rank);
      pen.fillRect(x, y, p.cell - space, p.cell - space);
      pen.fillStyle = legible(pen.fillStyle);
      if (p.cell >= 24) pen.fillText(rank, x + (p.cell - space) / 2, y + (p.cell - space) / 2 + 1);
    }
    pen.globalAlpha = 1;
    return p;
  }

  function rankAt(event) {
    const p = plot(), across = Math.floor(event.offsetX / (p.width + p.gap)), down = Math.floor(event.offsetY / (p.height + p.gap));
    const x = Math.floor((event.offsetX - across * (p.width + p.gap) - INSET) / p.cell);
    const y = Math.floor((event.offsetY - down * (p.height + p.gap) - INSET - p.head) / p.cell);
    const device = y * p.columns + x, rank = (down * p.across + across) * perNode + device;
    return across < p.across && 0 <= x && x < p.columns && 0 <= y && device < perNode && rank < shown ? rank : -1;
  }

  // Return the text about a device and its group.
  function describe(rank) {
    const it = axes[axis], first = firstOf(rank, it), members = Array.from({length: Math.min(it.size, 8)}, (_, i) => first + i * it.stride);
    const more = it.size > 8 ? `, … ${first + (it.size - 1) * it.stride}` : "";
    const positions = axes.map(a => `${a.name} ${positionOf(rank, a)}`).join(", ");
    return `rank ${rank}: device ${rank % perNode} of node ${Math.floor(rank / perNode)}\n${positions}\n${it.name} group: ${members.join(", ")}${more}`;
  }

  const buttons = [...document.querySelectorAll("button[data-axis]")];
  buttons.forEach((button, i) => button.addEventListener("click", () => {
    axis = i;
    buttons.forEach((other, j) => other.setAttribute("aria-pressed", i === j));
    drawMap();
  }));
  element.addEventListener("pointermove", event => {
    const rank = rankAt(event);
    if (rank !== under) {
      under = rank;
      drawMap();
    }
    show(event, rank < 0 ? "" : describe(rank));
  });
  element.addEventListener("pointerleave", event => {
    under = -1;
    drawMap();
    show(event, "");
  });
  window.addEventListener("resize", drawMap);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawMap);
  drawMap();
  element.dataset.drawn = shown;
})();
