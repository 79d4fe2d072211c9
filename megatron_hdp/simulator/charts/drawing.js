const HEIGHT = 300, RIGHT = 14, TOP = 14, BOTTOM = 44, ROW = 30;
const tip = document.getElementById("tip");

// Seconds, with as many digits as one reads.
const brief = (seconds) => duration(Number(seconds.toPrecision(4)), seconds);

// A value in its unit; `sight` is the greatest one beside it.
function shown(value, unit = "", sight = value) {
  if (value === null) return "-";
  if (unit === "s") return duration(value, sight);
  if (unit === "share") return `${Number((value * 100).toPrecision(3))} %`;
  for (const [name, scale] of [["T", 1e12], ["G", 1e9], ["M", 1e6], ["K", 1e5]])
    if (Math.abs(value) >= scale) {
      const letter = unit !== "bytes" && name === "G" ? "B" : name;
      return (value / (name === "K" ? 1e3 : scale)).toPrecision(3) + (unit ? ` ${name}B` : letter);
    }
  return String(Number(value.toPrecision(4))) + (unit ? " B" : "");
}

// Places of powers of two on a logarithmic axis, at most nine.
function powers(from, to) {
  const found = [], every = Math.ceil(Math.log2(to / from) / 8) || 1;
  for (let power = Math.ceil(Math.log2(from)); 2 ** power <= to; power += every) found.push(2 ** power);
  return found;
}

function add(parent, name, attributes, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  parent.appendChild(node);
  return node;
}

function legend(parent, names, colours) {
  const box = parent.appendChild(document.createElement("div"));
  box.className = "legend";
  names.forEach((name, i) => {
    const entry = box.appendChild(document.createElement("span"));
    entry.appendChild(document.createElement("i")).style.background = colours[i];
    entry.append(name);
  });
}

function showTip(event, text) {
  tip.textContent = text;
  tip.style.display = text ? "block" : "none";
  if (!text) return;
  tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${event.clientY + 14}px`;
}

// A section with a chart; it is drawn again when the window gets another width.
function draw(chart) {
  const box = document.createElement("section");
  box.className = "chart";
  box.appendChild(document.createElement("h2")).textContent = chart.title;
  if (chart.note) {
    const note = box.appendChild(document.createElement("p"));
    note.className = "note";
    note.textContent = chart.note;
  }
  legend(box, Object.keys(chart.series), chart.colours);
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

function canvasOf(chart, width, height) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const said = Object.keys(chart.series).join(", ");
  for (const [key, value] of Object.entries({ viewBox: `0 0 ${width} ${height}`, role: "img",
    "aria-label": `${chart.title}: ${chart.y_label} of ${said}` })) svg.setAttribute(key, value);
  svg.addEventListener("mouseleave", (event) => showTip(event, ""));
  return svg;
}

function drawSeries(chart, WIDTH) {
  const LEFT = 76, names = Object.keys(chart.series), values = Object.values(chart.series);
  const svg = canvasOf(chart, WIDTH, HEIGHT);
  const bars = chart.kind === "bars", n = chart.x.length;
  const xOf = (name) => chart.own_x?.[name] ?? chart.x;
  const limits = Object.entries(chart.limits ?? {});
  const sums = chart.x.map((_, k) => values.reduce((sum, one) => sum + (one[k] ?? 0), 0));
  const all = (chart.kind === "stacked" ? sums : values.flat()).filter((v) => v !== null);
  const positive = [...all, ...limits.map(([, v]) => v)].filter((v) => v > 0);
  const top = positive.reduce((most, v) => Math.max(most, v), 1e-300);
  const low = chart.log ? positive.reduce((least, v) => Math.min(least, v), top) / 1.2 : 0;
  const high = chart.log ? top * 1.2 : top * 1.05;
  const scaled = (v) => chart.log ? (Math.log(Math.max(v, low)) - Math.log(low)) / (Math.log(high) - Math.log(low))
    : v / high;
  const toY = (v) => HEIGHT - BOTTOM - scaled(v) * (HEIGHT - TOP - BOTTOM);
  const ends = names.map((name) => xOf(name)[xOf(name).length - 1] ?? 0);
  const first = bars ? 0 : chart.x[0] ?? 0, last = bars ? n : chart.x_end ?? Math.max(...ends);
  const toX = (v) => LEFT + (Math.min(v, last) - first) / (last - first || 1) * (WIDTH - LEFT - RIGHT);

  for (const v of chart.log ? powers(low, high) : ticks(low, high, 6)) {
    add(svg, "line", { x1: LEFT, x2: WIDTH - RIGHT, y1: toY(v), y2: toY(v), class: "grid" });
    add(svg, "text", { x: LEFT - 6, y: toY(v) + 4, "text-anchor": "end" }, shown(v, chart.unit, high));
  }
  if (bars) {
    const width = 0.84 / names.length;
    values.forEach((one, i) => one.forEach((v, k) => add(svg, "rect", {
      x: toX(k + 0.08 + i * width), width: toX(width) - toX(0), y: toY(v), height: toY(0) - toY(v),
      fill: chart.colours[i] })));
    const every = Math.ceil(n * 44 / WIDTH);
    chart.x.forEach((name, k) => k % every || add(svg, "text",
      { x: toX(k + 0.5), y: HEIGHT - BOTTOM + 15, "text-anchor": "middle" }, name));
  } else {
    const whole = n > 0 && chart.x.every(Number.isInteger);
    for (const v of ticks(first, last, WIDTH / 120)) {
      if (whole && !Number.isInteger(v)) continue;
      add(svg, "text", { x: toX(v), y: HEIGHT - BOTTOM + 15,
        "text-anchor": toX(v) > WIDTH - 30 ? "end" : "middle" }, shown(v, chart.x_unit, last));
    }
    const floor = chart.x.map(() => 0);
    values.forEach((one, i) => {
      const x = xOf(names[i]);
      const above = one.map((v, k) => chart.kind === "stacked" ? floor[k] + (v ?? 0) : v);
      if (chart.kind === "stacked") {
        const places = above.map((v, k) => `${toX(x[k])},${toY(v)}`);
        const back = floor.map((v, k) => `${toX(x[k])},${toY(v)}`).reverse();
        add(svg, "polygon", { points: [...places, ...back].join(" "), fill: chart.colours[i] });
        above.forEach((v, k) => { floor[k] = v; });
        return;
      }
      const places = [];
      for (let k = 0; k < x.length && x[k] <= last; k++) {
        if (above[k] === null) continue;
        if (chart.kind === "stairs" && places.length) places.push(`${toX(x[k])},${toY(above[k - 1])}`);
        places.push(`${toX(x[k])},${toY(above[k])}`);
      }
      const shownOf = x.filter((v) => v <= last).length;  // a stair goes on to the end of the axis
      if (chart.kind === "stairs" && shownOf < x.length) places.push(`${toX(last)},${toY(above[shownOf - 1])}`);
      add(svg, "polyline", { points: places.join(" "), fill: "none", stroke: chart.colours[i],
        "stroke-width": chart.kind === "stairs" ? 1.6 : 2, "stroke-linejoin": "round" });
      if (chart.kind === "lines" && x.length <= 60) x.forEach((v, k) => above[k] === null || add(svg, "circle",
        { cx: toX(v), cy: toY(above[k]), r: 3, fill: chart.colours[i] }));
    });
  }
  for (const mark of chart.marks)
    add(svg, "line", { x1: toX(mark), x2: toX(mark), y1: TOP, y2: HEIGHT - BOTTOM, class: "mark" });
  for (const [name, v] of limits) {
    add(svg, "line", { x1: LEFT, x2: WIDTH - RIGHT, y1: toY(v), y2: toY(v), class: "limit" });
    add(svg, "text", { x: WIDTH - RIGHT, y: toY(v) - 4, "text-anchor": "end", class: "limit" },
      `${name}: ${shown(v, chart.unit)}`);
  }
  add(svg, "text", { x: (LEFT + WIDTH) / 2, y: HEIGHT - 8, "text-anchor": "middle" }, chart.x_label);
  add(svg, "text", { x: 12, y: HEIGHT / 2, "text-anchor": "middle",
    transform: `rotate(-90 12 ${HEIGHT / 2})` }, chart.y_label);

  svg.addEventListener("mousemove", (event) => {
    const area = svg.getBoundingClientRect();
    const place = (event.clientX - area.left) / area.width * WIDTH;
    const v = first + (place - LEFT) / (WIDTH - LEFT - RIGHT) * (last - first);
    if (v < first || v > last) { showTip(event, ""); return; }
    const nearest = (x) => x.reduce((best, one, j) => Math.abs(one - v) < Math.abs(x[best] - v) ? j : best, 0);
    const before = (x) => x.reduce((best, one, j) => one <= v ? j : best, -1);
    const k = bars ? Math.min(n - 1, Math.floor(v)) : nearest(chart.x);
    const at = chart.kind === "stairs" ? shown(v, chart.x_unit, last)
      : bars ? chart.x[k] : shown(chart.x[k], chart.x_unit, last);
    const own = (i) => {
      if (chart.kind !== "stairs") return values[i][k];
      const x = xOf(names[i]);
      return v > x[x.length - 1] ? null : values[i][before(x)] ?? null;
    };
    showTip(event, [`${chart.x_label}: ${at}`,
      ...names.map((name, i) => `${name}: ${shown(own(i), chart.unit)}`)].join("\n"));
  });
  return svg;
}

// Lying bars made of all series, the sum behind each.
function drawPiles(chart, WIDTH) {
  const names = Object.keys(chart.series), values = Object.values(chart.series);
  const longest = chart.x.reduce((most, name) => Math.max(most, name.length), 0);
  const LEFT = 16 + 7.5 * longest, END = 84, height = ROW * chart.x.length + 40;
  const svg = canvasOf(chart, WIDTH, height);
  const sums = chart.x.map((_, k) => values.reduce((sum, one) => sum + one[k], 0));
  const most = chart.x_end ?? sums.reduce((high, one) => Math.max(high, one), 1e-300);
  const toX = (v) => LEFT + Math.min(v / most, 1.02) * (WIDTH - LEFT - END);  // beyond it: cut
  for (const v of ticks(0, most, WIDTH / 140)) {
    add(svg, "line", { x1: toX(v), x2: toX(v), y1: 4, y2: height - 36, class: "grid" });
    add(svg, "text", { x: toX(v), y: height - 20, "text-anchor": "middle" }, shown(v, chart.unit, most));
  }
  chart.x.forEach((name, k) => {
    const y = 8 + k * ROW;
    const told = (v) => chart.unit === "s" ? brief(v) : shown(v, chart.unit);
    let from = 0;
    add(svg, "text", { x: LEFT - 8, y: y + 15, "text-anchor": "end", class: "name" }, name);
    values.forEach((one, i) => {
      const part = add(svg, "rect", { x: toX(from), y, width: toX(from + one[k]) - toX(from), height: ROW - 10,
        fill: chart.colours[i] });
      const text = `${name}: ${names[i]}\n${told(one[k])}, `
        + `${(100 * one[k] / (sums[k] || 1)).toFixed(1)} % of ${told(sums[k])}`;
      part.addEventListener("mousemove", (event) => showTip(event, text));
      from += one[k];
    });
    add(svg, "text", { x: toX(from) + 6, y: y + 15, class: "name" }, told(sums[k]));
    if (sums[k] > most) {  // two strokes where it is cut
      for (const x of [toX(0.985 * most), toX(most)])
        add(svg, "path", { d: `M${x - 3},${y + ROW - 8}L${x + 3},${y - 2}`, class: "cut" });
    }
  });
  add(svg, "text", { x: LEFT, y: height - 3 }, chart.x_label);
  return svg;
}
