// Draws what page.py put into the page: charts as SVG, bars of ranks on a canvas.
const HEIGHT = 300, SIDE = 76, RIGHT = 14, TOP = 14, BOTTOM = 44, ROW = 30, AXIS = 26, TALLEST = 640;
const tip = document.getElementById("tip");

// Arrays of numbers from their bytes: what encoded() of page.py wrote.
function arrays(encoded) {
  const KINDS = { i: Int32Array, d: Float64Array, b: Uint8Array }, found = {};
  for (const [name, [kind, text]] of Object.entries(encoded)) {
    const binary = atob(text), bytes = new Uint8Array(binary.length);
    for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
    found[name] = new KINDS[kind](bytes.buffer);
  }
  return found;
}

// Round numbers from one end to the other, at most `wanted` of them.
function ticks(from, to, wanted) {
  const rough = (to - from) / Math.max(1, wanted) || 1, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999);
  const found = [];
  for (let k = Math.ceil(from / step - 1e-9); k * step <= to + step * 1e-9; k++)
    found.push(Number((k * step).toPrecision(12)));
  return found;
}

// Seconds, in a unit that suits all that is in sight.
function duration(seconds, sight) {
  const size = seconds === 0 ? sight : Math.max(Math.abs(seconds), sight / 10);
  const [scale, unit] = size >= 1 ? [1, "s"] : size >= 1e-3 ? [1e3, "ms"] : [1e6, "µs"];
  return `${Number((seconds * scale).toPrecision(6))} ${unit}`;
}

const count = (number) => number.toLocaleString("en-US");
const several = (number, name) => `${count(number)} ${name}${number === 1 ? "" : "s"}`;
const brief = (seconds) => duration(Number(seconds.toPrecision(4)), seconds);

// A value in its unit; `sight` is the greatest one beside it.
function shown(value, unit, sight = value) {
  if (value === null) return "-";
  if (unit === "s") return duration(value, sight);
  if (unit === "share") return `${Number((value * 100).toPrecision(3))} %`;
  if (unit === "bytes")
    for (const [name, scale] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["KB", 1e3], ["B", 1]])
      if (Math.abs(value) >= scale) return `${(value / scale).toPrecision(3)} ${name}`;
  return String(Number(value.toPrecision(4)));
}

function add(parent, name, attributes, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  parent.appendChild(node);
  return node;
}

function addText(parent, name, text, className = "") {
  const node = parent.appendChild(document.createElement(name));
  node.className = className;
  node.textContent = text;
}

// Entries of a name and a colour; `choose` makes those with a third value, which it is given, buttons.
function legend(parent, entries, choose) {
  const box = parent.appendChild(document.createElement("div"));
  box.className = "legend";
  for (const [name, colour, value] of entries) {
    const entry = box.appendChild(document.createElement(value === undefined ? "span" : "button"));
    entry.appendChild(document.createElement("i")).style.background = colour;
    entry.append(name);
    if (value === undefined) continue;
    entry.setAttribute("aria-pressed", "true");
    entry.addEventListener("click", () => entry.setAttribute("aria-pressed", String(choose(value))));
  }
}

function showTip(event, text) {
  tip.textContent = text;
  tip.style.display = text ? "block" : "none";
  if (!text) return;
  tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${event.clientY + 14}px`;
}

// A section with a chart; it is drawn again when the window gets another width.
function chartSection(chart) {
  const box = document.createElement("section"), names = Object.keys(chart.series);
  box.className = "chart";
  addText(box, "h2", chart.title);
  if (chart.note) addText(box, "p", chart.note, "note");
  legend(box, names.map((name, i) => [name, chart.colours[i]]));
  let svg = null;
  const again = () => {
    const width = Math.max(320, box.clientWidth || 1060);
    const next = chart.kind === "piles" ? drawPiles(chart, width) : drawSeries(chart, width);
    if (svg) svg.replaceWith(next); else box.appendChild(next);
    svg = next;
  };
  again();
  if (globalThis.requestAnimationFrame) requestAnimationFrame(again);  // it has its width now
  globalThis.addEventListener?.("resize", again);
  return box;
}

function svgOf(chart, width, height) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const said = Object.keys(chart.series).join(", ");
  for (const [key, value] of Object.entries({ viewBox: `0 0 ${width} ${height}`, role: "img",
    "aria-label": `${chart.title}: ${chart.y_label} of ${said}` })) svg.setAttribute(key, value);
  svg.addEventListener("mouseleave", (event) => showTip(event, ""));
  return svg;
}

// Lines between points, or stairs that keep a value until the next place.
function drawSeries(chart, width) {
  const names = Object.keys(chart.series), values = Object.values(chart.series);
  const svg = svgOf(chart, width, HEIGHT), stairs = chart.kind === "stairs";
  const xOf = (i) => chart.own_x?.[names[i]] ?? chart.x;
  const limits = Object.entries(chart.limits ?? {});
  const all = [...values.flat(), ...limits.map(([, v]) => v)].filter((v) => v !== null);
  const high = 1.05 * all.reduce((most, v) => Math.max(most, v), 1e-300);
  const first = chart.x[0] ?? 0, last = chart.x_end ?? Math.max(...names.map((_, i) => xOf(i).at(-1) ?? 0));
  const toY = (v) => HEIGHT - BOTTOM - v / high * (HEIGHT - TOP - BOTTOM);
  const toX = (v) => SIDE + (Math.min(v, last) - first) / (last - first || 1) * (width - SIDE - RIGHT);
  const label = (x, y, anchor, text, more = {}) => add(svg, "text", { x, y, "text-anchor": anchor, ...more }, text);

  for (const v of ticks(0, high, 6)) {
    add(svg, "line", { x1: SIDE, x2: width - RIGHT, y1: toY(v), y2: toY(v), class: "grid" });
    label(SIDE - 6, toY(v) + 4, "end", shown(v, chart.unit, high));
  }
  const whole = chart.x.length > 0 && chart.x.every(Number.isInteger);
  for (const v of ticks(first, last, width / 120))
    if (!whole || Number.isInteger(v))
      label(toX(v), HEIGHT - BOTTOM + 15, toX(v) > width - 30 ? "end" : "middle", shown(v, chart.x_unit, last));
  values.forEach((one, i) => {
    const x = xOf(i), inSight = x.filter((v) => v <= last).length, places = [];
    for (let k = 0; k < inSight; k++) {
      if (one[k] === null) continue;
      if (stairs && places.length) places.push(`${toX(x[k])},${toY(one[k - 1])}`);
      places.push(`${toX(x[k])},${toY(one[k])}`);
    }
    // a stair reaches the end of the axis
    if (stairs && inSight < x.length) places.push(`${toX(last)},${toY(one[inSight - 1])}`);
    add(svg, "polyline", { points: places.join(" "), fill: "none", stroke: chart.colours[i],
      "stroke-width": stairs ? 1.6 : 2, "stroke-linejoin": "round" });
    if (!stairs && x.length <= 60) x.forEach((v, k) => one[k] === null || add(svg, "circle",
      { cx: toX(v), cy: toY(one[k]), r: 3, fill: chart.colours[i] }));
  });
  for (const [name, v] of limits) {
    add(svg, "line", { x1: SIDE, x2: width - RIGHT, y1: toY(v), y2: toY(v), class: "limit" });
    label(width - RIGHT, toY(v) - 4, "end", `${name}: ${shown(v, chart.unit)}`, { class: "limit" });
  }
  label((SIDE + width) / 2, HEIGHT - 8, "middle", chart.x_label);
  label(12, HEIGHT / 2, "middle", chart.y_label, { transform: `rotate(-90 12 ${HEIGHT / 2})` });

  svg.addEventListener("mousemove", (event) => {
    const area = svg.getBoundingClientRect();
    const place = (event.clientX - area.left) / area.width * width;
    const v = first + (place - SIDE) / (width - SIDE - RIGHT) * (last - first);
    if (v < first || v > last) { showTip(event, ""); return; }
    const k = chart.x.reduce((best, one, j) => Math.abs(one - v) < Math.abs(chart.x[best] - v) ? j : best, 0);
    const own = (i) => {
      if (!stairs) return values[i][k];
      const x = xOf(i);
      return v > x.at(-1) ? null : values[i][x.reduce((best, one, j) => one <= v ? j : best, -1)] ?? null;
    };
    showTip(event, [`${chart.x_label}: ${shown(stairs ? v : chart.x[k], chart.x_unit, last)}`,
      ...names.map((name, i) => `${name}: ${shown(own(i), chart.unit)}`)].join("\n"));
  });
  return svg;
}

// Lying bars made of all series, with their sum at the end.
function drawPiles(chart, width) {
  const names = Object.keys(chart.series), values = Object.values(chart.series);
  const longest = chart.x.reduce((most, name) => Math.max(most, name.length), 0);
  const left = 16 + 7.5 * longest, END = 84, height = ROW * chart.x.length + 40;
  const svg = svgOf(chart, width, height);
  const sums = chart.x.map((_, k) => values.reduce((sum, one) => sum + one[k], 0));
  const most = chart.x_end ?? sums.reduce((high, one) => Math.max(high, one), 1e-300);
  const toX = (v) => left + Math.min(v / most, 1.02) * (width - left - END);  // beyond it: cut
  for (const v of ticks(0, most, width / 140)) {
    add(svg, "line", { x1: toX(v), x2: toX(v), y1: 4, y2: height - 36, class: "grid" });
    add(svg, "text", { x: toX(v), y: height - 20, "text-anchor": "middle" }, shown(v, chart.unit, most));
  }
  chart.x.forEach((name, k) => {
    const y = 8 + k * ROW;
    let from = 0;
    add(svg, "text", { x: left - 8, y: y + 15, "text-anchor": "end", class: "name" }, name);
    values.forEach((one, i) => {
      const part = add(svg, "rect", { x: toX(from), y, width: toX(from + one[k]) - toX(from), height: ROW - 10,
        fill: chart.colours[i] });
      const text = `${name}: ${names[i]}\n${brief(one[k])}, `
        + `${(100 * one[k] / (sums[k] || 1)).toFixed(1)} % of ${brief(sums[k])}`;
      part.addEventListener("mousemove", (event) => showTip(event, text));
      from += one[k];
    });
    add(svg, "text", { x: toX(from) + 6, y: y + 15, class: "name" }, brief(sums[k]));
    if (sums[k] > most)  // two strokes where it is cut
      for (const x of [toX(0.985 * most), toX(most)])
        add(svg, "path", { d: `M${x - 3},${y + ROW - 8}L${x + 3},${y - 2}`, class: "cut" });
  });
  add(svg, "text", { x: left, y: height - 3 }, chart.x_label);
  return svg;
}

// Bars of ranks over time, one Gantt chart below the other on one scale.
function drawBars(parent, bars) {
  if (bars.title) addText(parent, "h2", bars.title);
  addText(parent, "p", bars.note, "note");
  bars.hidden = new Set();
  const drawn = [];
  legend(parent, bars.legend, (group) => {
    const hides = !bars.hidden.delete(group);
    if (hides) bars.hidden.add(group);
    drawn.forEach((one) => one.draw());
    return !hides;
  });
  for (const gantt of bars.gantts) {
    const cut = gantt.step > bars.window ? `, cut at ${brief(bars.window)}` : "";
    if (gantt.name) addText(parent, "h3", `${gantt.name}: ${brief(gantt.step)}${cut}`);
    drawn.push(new Gantt(parent, gantt, bars));
  }
}

class Gantt {
  constructor(parent, gantt, bars) {
    Object.assign(this, { gantt, bars, ...arrays(gantt.arrays), chosen: -1, held: null });
    this.plan = gantt.plan && arrays(gantt.plan);
    this.rank = (row) => gantt.ranks ? gantt.ranks[Math.floor(row / gantt.stages)] : Math.floor(row / gantt.stages);
    this.first = new Int32Array(gantt.rows + 1);  // bars come row by row, in the order of time
    for (const row of this.row) this.first[row + 1]++;
    for (let row = 0; row < gantt.rows; row++) this.first[row + 1] += this.first[row];
    this.size = Math.min(TALLEST, gantt.rows * Math.max(7, Math.min(24, 260 / gantt.rows)));
    this.canvas = parent.appendChild(document.createElement("canvas"));
    for (const [key, value] of Object.entries({ tabindex: "0", role: "application", "aria-label":
      `Bars of ${gantt.name || "the plan"}: ${gantt.rows / gantt.stages} ranks, ${brief(gantt.step)}; `
      + "arrow keys go from bar to bar" })) this.canvas.setAttribute(key, value);
    this.canvas.style.height = `${this.size + AXIS}px`;
    const on = (name, act) => this.canvas.addEventListener(name, act);
    on("pointermove", (event) => this.held ? this.move(event) : this.point(event));
    on("pointerdown", (event) => { this.held = { x: event.clientX, y: event.clientY, ...this.view }; });
    on("pointerup", () => { this.held = null; });
    on("pointerleave", (event) => { this.held = null; this.choose(-1, event); });
    on("blur", (event) => this.choose(-1, event));
    on("keydown", (event) => this.key(event));
    on("wheel", (event) => this.zoom(event));
    on("dblclick", () => this.showAll());
    globalThis.addEventListener?.("resize", () => this.draw());
    globalThis.matchMedia?.("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    this.showAll();
    if (globalThis.requestAnimationFrame) requestAnimationFrame(() => this.draw());
  }

  showAll() {
    this.view = { t0: 0, t1: this.bars.window, r0: 0, r1: this.gantt.rows };
    this.draw();
  }

  get perSecond() { return (this.width - SIDE - RIGHT) / (this.view.t1 - this.view.t0); }
  get perRow() { return this.size / (this.view.r1 - this.view.r0); }
  toX(time) { return SIDE + (time - this.view.t0) * this.perSecond; }
  toY(row) { return (row - this.view.r0) * this.perRow; }
  group(bar) { return this.bars.mostOfGroup.findIndex((most) => this.degree[bar] <= most); }

  draw() {
    const scale = globalThis.devicePixelRatio || 1, { gantt, bars, view } = this;
    this.width = this.canvas.getBoundingClientRect().width || 1060;
    this.canvas.width = Math.round(this.width * scale);
    this.canvas.height = Math.round((this.size + AXIS) * scale);
    const pen = this.canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(`--${name}`).trim();
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, this.width, this.size + AXIS);
    pen.save();
    pen.beginPath(); pen.rect(SIDE, 0, this.width - SIDE - RIGHT, this.size); pen.clip();
    const tall = this.perRow, gap = tall > 5 ? 0.5 : 0;
    const fill = (from, to, row, paint) => {
      const x0 = this.toX(Math.max(from, view.t0)), x1 = this.toX(Math.min(to, view.t1));
      if (x1 <= x0) return;
      pen.fillStyle = paint;
      pen.fillRect(x0, this.toY(row) + gap, Math.max(x1 - x0, 0.6), Math.max(1, tall - 2 * gap));
      if (gap && x1 - x0 > 5) {
        pen.fillStyle = colour("page");
        pen.fillRect(x1 - 0.6, this.toY(row), 0.6, tall);
      }
    };
    let drawnTo = -1;
    for (let row = Math.floor(view.r0); row < Math.min(gantt.rows, view.r1); row++) {
      const bottom = Math.round(this.toY(row + 1));
      if (tall < 1 && bottom === drawnTo) continue;  // thinner than a pixel: its neighbour has it
      drawnTo = bottom;
      fill(0, gantt.makespan, row, colour("idle"));
      for (const [, at, length, paint] of gantt.behind) fill(at, at + length, row, paint);
      for (let bar = this.at(row, view.t0); bar < this.first[row + 1] && this.start_s[bar] <= view.t1; bar++) {
        const group = this.group(bar), isPale = gantt.stages > 1 && !this.backward[bar];
        if (bars.hidden.has(group)) continue;
        const until = this.start_s[bar] + this.busy_s[bar];
        fill(this.start_s[bar], until, row, (isPale ? bars.pale : bars.colours)[group]);
        if (this.plan) fill(until, this.end_s[bar], row, bars.local);
      }
    }
    for (const [time, paint, dash] of gantt.limits) {
      pen.strokeStyle = paint; pen.lineWidth = 2; pen.setLineDash(dash);
      pen.beginPath(); pen.moveTo(this.toX(time), 0); pen.lineTo(this.toX(time), this.size); pen.stroke();
    }
    pen.setLineDash([]);
    if (this.chosen >= 0) this.outline(pen);
    pen.restore();
    this.axes(pen, colour);
  }

  // The chosen bar; of a plan, where its micro-batch is on all ranks.
  outline(pen) {
    pen.strokeStyle = "#d1007a"; pen.lineWidth = 2;
    for (let bar = 0; bar < this.row.length; bar++)
      if (bar === this.chosen || this.plan && this.micro_batch[bar] === this.micro_batch[this.chosen])
        pen.strokeRect(this.toX(this.start_s[bar]), this.toY(this.row[bar]),
          Math.max(2, (this.end_s[bar] - this.start_s[bar]) * this.perSecond), Math.max(1, this.perRow));
  }

  axes(pen, colour) {
    const { gantt, view } = this, rankTall = this.perRow * gantt.stages, every = Math.ceil(13 / rankTall);
    pen.fillStyle = colour("soft"); pen.font = "12px system-ui, sans-serif";
    pen.textBaseline = "alphabetic";
    for (const t of ticks(view.t0, view.t1, this.width / 120)) {
      pen.fillRect(this.toX(t), this.size + 2, 1, 5);
      pen.textAlign = this.toX(t) > this.width - 40 ? "right" : "center";
      pen.fillText(duration(t, view.t1 - view.t0), this.toX(t), this.size + AXIS - 6);
    }
    pen.textAlign = "right"; pen.textBaseline = "middle";
    const ends = [view.r0 / gantt.stages, view.r1 / gantt.stages];
    for (let i = Math.ceil(ends[0] / every) * every; i < ends[1]; i += every) {
      pen.fillText(`${i ? "" : "rank "}${this.rank(i * gantt.stages)}`, SIDE - 7, this.toY((i + 0.5) * gantt.stages));
      if (gantt.stages > 1 && i && rankTall > 5) {
        pen.fillStyle = colour("page");
        pen.fillRect(SIDE, this.toY(i * gantt.stages) - 0.75, this.width - SIDE - RIGHT, 1.5);
        pen.fillStyle = colour("soft");
      }
    }
  }

  // The first bar of a row that ends after a time.
  at(row, time) {
    let low = this.first[row], high = this.first[row + 1];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.end_s[middle] < time) low = middle + 1; else high = middle;
    }
    return low;
  }

  describe(bar) {
    const { gantt, plan } = this, row = this.row[bar], rank = this.rank(row), m = this.micro_batch[bar];
    const pass = (gantt.chunks > 1 ? `, chunk ${this.chunk[bar]}` : "")
      + (this.backward[bar] ? ", backward" : ", forward");
    const joined = this.joined ? this.joined[bar] : 1, few = (ids) => [...ids.subarray(0, 20)].join(", ")
      + (ids.length > 20 ? ", ..." : "");
    const lines = [
      `${gantt.name ? `${gantt.name}, ` : ""}rank ${rank}`
        + (gantt.stages > 1 ? `, stage ${row % gantt.stages}${pass}` : ""),
      joined > 1 ? `${count(joined)} short micro-batches, from ${m}` : `micro-batch ${m}`,
      `ring of ${several(this.degree[bar], "rank")}`
        + (plan ? `: ${few(plan.ranks.subarray(plan.rank_offsets[m], plan.rank_offsets[m + 1]))}`
          : `; ${count(this.tokens[bar])} tokens on this rank`),
    ];
    if (plan) {
      const tokens = (ids) => several(ids.reduce((sum, id) => sum + plan.lengths[id], 0), "token");
      const ids = plan.sequences.subarray(plan.sequence_offsets[m], plan.sequence_offsets[m + 1]);
      const [from, to] = [plan.local_offsets[m], plan.local_offsets[m + 1]];
      const local = plan.local_sequences.subarray(from, to).filter((_, i) => plan.local_ranks[from + i] === rank);
      lines.push(`${several(ids.length, "sequence")}, ${tokens(ids)}: ${few(ids)}`);
      if (local.length) lines.push(`local on this rank: ${several(local.length, "sequence")}, ${tokens(local)}: ${few(local)}`);
      if (plan.offload_ratios[m] > 0) lines.push(`offload ratio ${plan.offload_ratios[m].toFixed(3)}`);
    }
    const works = plan ? this.end_s[bar] - this.start_s[bar] : this.busy_s[bar];
    return [...lines, `starts at ${brief(this.start_s[bar])}, works ${brief(works)}`].join("\n");
  }

  place(event) {
    const box = this.canvas.getBoundingClientRect(), { view } = this;
    return { time: view.t0 + (event.clientX - box.left - SIDE) / this.perSecond,
      row: view.r0 + (event.clientY - box.top) / this.perRow };
  }

  // What lies at a place: a bar, a part of the step after the last backward, or waiting.
  point(event) {
    const { gantt, view } = this, { time, row: at } = this.place(event), row = Math.floor(at);
    if (at < view.r0 || at >= view.r1 || time < view.t0 || time > gantt.step) { this.choose(-1, event); return; }
    const found = this.at(row, time), there = found < this.first[row + 1] && this.start_s[found] <= time;
    const bar = there && !this.bars.hidden.has(this.group(found)) ? found : -1;
    this.choose(bar, event);
    if (bar >= 0) return;
    const part = gantt.behind.find(([, from, length]) => from <= time && time <= from + length);
    showTip(event, part ? `${gantt.name}: ${part[0]}, ${brief(part[2])}` : `rank ${this.rank(row)} waits`);
  }

  choose(bar, event) {
    const changed = bar !== this.chosen;
    this.chosen = bar;
    if (changed) this.draw();
    showTip(event, bar < 0 ? "" : this.describe(bar));
  }

  // Keeps `at` where it is and what is in sight within [0, most].
  static zoomed(low, high, at, factor, most) {
    const size = Math.min(most, (high - low) * factor);
    const start = Math.min(Math.max(0, at - (at - low) * size / (high - low)), most - size);
    return [start, start + size];
  }

  zoom(event) {
    if (!event.ctrlKey) return;  // else the page scrolls
    event.preventDefault();
    const factor = Math.exp((event.deltaY || event.deltaX) * 0.0015), { time, row } = this.place(event), { view } = this;
    if (event.shiftKey) [view.r0, view.r1] = Gantt.zoomed(view.r0, view.r1, row, factor, this.gantt.rows);
    else [view.t0, view.t1] = Gantt.zoomed(view.t0, view.t1, time, factor, this.bars.window);
    this.draw();
  }

  move(event) {
    const { held, view } = this;
    const time = held.t0 - (event.clientX - held.x) / this.perSecond, row = held.r0 - (event.clientY - held.y) / this.perRow;
    [view.t0, view.t1] = Gantt.zoomed(time, time + held.t1 - held.t0, time, 1, this.bars.window);
    [view.r0, view.r1] = Gantt.zoomed(row, row + held.r1 - held.r0, row, 1, this.gantt.rows);
    this.draw();
  }

  key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key], rows = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (step === undefined && rows === undefined) return;
    event.preventDefault();
    let bar = Math.max(0, this.chosen);
    if (step && this.chosen >= 0) bar = Math.max(0, Math.min(this.row.length - 1, bar + step));
    if (rows) {
      const next = this.row.indexOf(this.row[bar] + rows);
      if (next >= 0) bar = next;
    }
    const box = this.canvas.getBoundingClientRect();
    this.choose(bar, { clientX: box.left + this.toX(this.start_s[bar]),
      clientY: box.top + this.toY(this.row[bar] + 1) });
    document.getElementById("said").textContent = this.describe(bar);
  }
}

const page = JSON.parse(document.getElementById("data").textContent);
for (const [id, charts] of Object.entries(page.charts))
  for (const chart of charts) document.getElementById(id).appendChild(chartSection(chart));
if (page.bars) drawBars(document.getElementById("bars"), page.bars);
