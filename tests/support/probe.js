// Looks at a page from within, as a test asks: what was written where, what colours there are, what the mouse is told.
"use strict";
(() => {
  const errors = [], drawn = [], pen = CanvasRenderingContext2D.prototype, fillText = pen.fillText;
  window.addEventListener("error", event => errors.push(event.message));
  window.addEventListener("unhandledrejection", event => errors.push(String(event.reason)));
  pen.fillText = function (text, x, y) {
    const {a, d} = this.getTransform(), wide = this.measureText(text).width, left = {center: wide / 2, right: wide}[this.textAlign] || 0;
    drawn.push({canvas: this.canvas, text: String(text), box: [x - left, y - 5, x - left + wide, y + 5]});
    fillText.apply(this, arguments);
  };
  const overlap = (a, b) => Math.min(a[2], b[2]) - Math.max(a[0], b[0]) > 1 && Math.min(a[3], b[3]) - Math.max(a[1], b[1]) > 1;
  const pairs = texts => texts.flatMap((a, i) => texts.slice(i + 1).filter(b => overlap(a.box, b.box)).map(b => [a.text, b.text])).slice(0, 9);

  function texts() {
    const walker = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT), found = [];
    while (walker.nextNode()) {
      const parent = walker.currentNode.parentElement;
      if (!walker.currentNode.data.trim() || ["NOSCRIPT", "TITLE"].includes(parent.tagName) || parent.tagName === "title") continue;
      const range = document.createRange();
      range.selectNodeContents(walker.currentNode);
      for (const r of range.getClientRects()) found.push({text: walker.currentNode.data, box: [r.left, r.top, r.right, r.bottom]});
    }
    return found;
  }

  const rgb = css => {
    const canvas = document.createElement("canvas").getContext("2d");
    canvas.fillStyle = css;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const light = css => rgb(css).map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const contrast = (a, b) => (Math.max(light(a), light(b)) + 0.05) / (Math.min(light(a), light(b)) + 0.05);

  function point(element, x, y, type = "pointermove") {
    const {left, top} = element.getBoundingClientRect();
    element.dispatchEvent(new PointerEvent(type, {clientX: left + x, clientY: top + y, bubbles: true}));
    return document.getElementById("tip").hidden ? "" : document.getElementById("tip").textContent;
  }

  // What is drawn and told at moments of ranks.
  function look(asked) {
    const canvas = document.getElementById("timeline"), image = canvas.getContext("2d");
    return asked.map(([rank, t]) => {
      const x = LEFT + (t - view.from) / (view.to - view.from) * (canvas.clientWidth - LEFT - RIGHT);
      const y = TOP + (rank + 0.5) * rowHeight(), pixel = [...image.getImageData(x * devicePixelRatio, (TOP + rank * rowHeight() + 2) * devicePixelRatio, 1, 1).data];
      const kind = ["forward", "backward", "send", "wait", ...Object.keys(plan.drawn)]
        .find(name => rgb(colour(name)).every((v, i) => Math.abs(v - pixel[i]) < 3));
      return [kind || pixel.join(), point(canvas, x, y)];
    });
  }

  window.probe = async asked => {
    while (!document.getElementById("timeline").dataset.ends && !errors.length) await new Promise(done => setTimeout(done, 20));
    const canvases = [...document.querySelectorAll("canvas")].map(canvas => ({
      id: canvas.id,
      ...canvas.dataset,
      overlaps: pairs(drawn.filter(one => one.canvas === canvas)),
      outside: drawn.filter(({canvas: on, box}) => on === canvas && (box[0] < 0 || box[1] < -1 || box[2] > canvas.clientWidth || box[3] > canvas.clientHeight)).map(one => one.text).slice(0, 9),
      blank: canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data.every(v => v === 0),
    }));
    const seen = errors.length ? [] : look(asked);
    document.getElementById("zoom-in").click();
    const halved = (view.to - view.from) / plan.step, map = document.getElementById("map");
    document.getElementById("zoom-whole").click();
    const memory = point(document.getElementById("memory"), 200, 100);
    const device = point(map, 8, 25), buttons = [...document.querySelectorAll("button[data-axis]")];
    buttons.at(-1).click();
    const paper = getComputedStyle(document.body).backgroundColor;
    const written = texts();
    const out = {
      errors, canvases, seen, halved, memory, device,
      pressed: buttons.filter(button => button.getAttribute("aria-pressed") === "true").map(button => button.dataset.axis),
      whole: view.to - view.from === plan.step,
      sideways: document.documentElement.scrollWidth - innerWidth,
      overlaps: pairs(written),
      cut: [...document.querySelectorAll("svg text")].filter(text => {
        const a = text.getBoundingClientRect(), b = text.ownerSVGElement.getBoundingClientRect();
        return a.left < b.left - 1 || a.right > b.right + 1 || a.top < b.top - 1 || a.bottom > b.bottom + 1;
      }).map(text => text.textContent),
      contrast: ["ink", "dim"].map(name => contrast(colour(name), paper)),
      paper: light(paper),
    };
    document.body.innerHTML = "";
    document.body.append(Object.assign(document.createElement("pre"), {id: "probe", textContent: JSON.stringify(out)}));
  };
})();
