// One step of each strategy, all on one scale of time.
function drawGantts(parent, report) {
  const heading = (level, text) => {
    parent.appendChild(document.createElement(level)).textContent = text;
  };
  const one = report.gantts[0], few = report.gantts.some((g) => g.ranks.length < g.numRanks);
  heading("h2", "One step of each strategy, on one scale of time");
  const note = parent.appendChild(document.createElement("p"));
  note.className = "note";
  note.textContent = "A bar is a rank's own work on a micro-batch, coloured by the ranks of its ring"
    + (one.stages > 1 ? `; a rank has ${one.stages} rows, a stage each; a forward is paler than its backward` : "")
    + `; what is left grey is waiting.${few ? ` Of ${count(one.numRanks)} HDP ranks a few are shown.` : ""}`
    + " Arrow keys go from bar to bar.";
  const behind = new Map(report.gantts.flatMap((g) => g.behind.map(([name, , , colour]) => [name, colour])));
  legend(parent, [...report.groupNames, "waiting", ...behind.keys()],
    [...report.colours, "var(--idle)", ...behind.values()]);
  for (const gantt of report.gantts) {
    const cut = gantt.step > report.window ? `, cut at ${brief(report.window)}` : "";
    heading("h3", `${gantt.name}: ${brief(gantt.step)}${cut}`);
    new Rows(parent, gantt, report);
  }
}

class Rows {
  constructor(parent, gantt, report) {
    Object.assign(this, { gantt, report, ...arrays(gantt.arrays), chosen: -1 });
    this.numRows = gantt.ranks.length * gantt.stages;
    this.tall = Math.max(7, Math.min(16, 260 / this.numRows));
    this.canvas = parent.appendChild(document.createElement("canvas"));
    this.canvas.setAttribute("tabindex", "0");
    this.canvas.setAttribute("role", "application");
    this.canvas.setAttribute("aria-label", `Bars of ${gantt.name}: ${gantt.ranks.length} ranks, `
      + `step of ${brief(gantt.step)}; arrow keys go from bar to bar`);
    this.canvas.style.height = `${this.numRows * this.tall + 26}px`;
    const on = (name, act) => this.canvas.addEventListener(name, act);
    on("pointermove", (event) => this.point(event));
    on("pointerleave", (event) => this.choose(-1, event));
    on("blur", (event) => this.choose(-1, event));
    on("keydown", (event) => this.key(event));
    globalThis.addEventListener?.("resize", () => this.draw());
    globalThis.matchMedia?.("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    this.draw();
    if (globalThis.requestAnimationFrame) requestAnimationFrame(() => this.draw());
  }

  toX(time) { return this.left + time / this.report.window * (this.width - this.left - RIGHT); }

  group(bar) { return this.report.mostOfGroup.findIndex((most) => this.degree[bar] <= most); }

  draw() {
    const box = this.canvas.getBoundingClientRect(), scale = globalThis.devicePixelRatio || 1;
    const height = this.numRows * this.tall + 26, { gantt, report, tall } = this;
    this.width = box.width || 1060;
    this.left = 76;
    this.canvas.width = Math.round(this.width * scale);
    this.canvas.height = Math.round(height * scale);
    const pen = this.canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(`--${name}`).trim();
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, this.width, height);
    const fill = (from, to, row, paint) => {
      const x0 = this.toX(from), x1 = this.toX(Math.min(to, report.window));
      if (x1 <= x0) return;
      pen.fillStyle = paint;
      pen.fillRect(x0, row * tall + 0.5, Math.max(x1 - x0, 0.6), tall - 1);
      if (x1 - x0 > 5) { pen.fillStyle = colour("page"); pen.fillRect(x1 - 0.6, row * tall, 0.6, tall); }
    };
    for (let row = 0; row < this.numRows; row++) {
      fill(0, gantt.makespan, row, colour("idle"));
      for (const [, at, length, paint] of gantt.behind) fill(at, at + length, row, paint);
    }
    for (let bar = 0; bar < this.row.length; bar++) {
      const paints = gantt.stages > 1 && !this.backward[bar] ? report.pale : report.colours;
      fill(this.start[bar], this.start[bar] + this.busy[bar], this.row[bar], paints[this.group(bar)]);
    }
    if (this.chosen >= 0) {
      const bar = this.chosen, x0 = this.toX(this.start[bar]);
      pen.strokeStyle = "#d1007a"; pen.lineWidth = 2;
      pen.strokeRect(x0, this.row[bar] * tall, Math.max(2, this.toX(this.end[bar]) - x0), tall);
    }
    this.axes(pen, colour, height);
  }

  axes(pen, colour, height) {
    const { gantt, report, tall } = this;
    pen.fillStyle = colour("soft"); pen.font = "12px system-ui, sans-serif";
    pen.textAlign = "center"; pen.textBaseline = "alphabetic";
    for (const t of ticks(0, report.window, this.width / 120)) {
      pen.fillRect(this.toX(t), height - 24, 1, 5);
      pen.textAlign = this.toX(t) > this.width - 40 ? "right" : "center";
      pen.fillText(duration(t, report.window), this.toX(t), height - 6);
    }
    pen.textAlign = "right"; pen.textBaseline = "middle";
    const rankTall = tall * gantt.stages, every = Math.ceil(13 / rankTall);
    gantt.ranks.forEach((rank, i) => {
      if (i % every === 0) pen.fillText(`${i ? "" : "rank "}${rank}`, this.left - 7, (i + 0.5) * rankTall);
      if (gantt.stages > 1 && i) {
        pen.fillStyle = colour("page");
        pen.fillRect(this.left, i * rankTall - 0.75, this.width - this.left - RIGHT, 1.5);
        pen.fillStyle = colour("soft");
      }
    });
  }

  describe(bar) {
    const { gantt } = this, row = this.row[bar];
    const rank = gantt.ranks[Math.floor(row / gantt.stages)], degree = this.degree[bar];
    const pass = (gantt.chunks > 1 ? `, chunk ${this.chunk[bar]}` : "")
      + (this.backward[bar] ? ", backward" : ", forward");
    return [
      `${gantt.name}, rank ${rank}` + (gantt.stages > 1 ? `, stage ${row % gantt.stages}${pass}` : ""),
      this.joined[bar] > 1 ? `${count(this.joined[bar])} short micro-batches, from ${this.microBatch[bar]}`
        : `micro-batch ${this.microBatch[bar]}`,
      `ring of ${degree} rank${degree > 1 ? "s" : ""}; ${count(this.tokens[bar])} tokens on this rank`,
      `starts at ${brief(this.start[bar])}, works ${brief(this.busy[bar])}`,
    ].join("\n");
  }

  // What stands at a place: a bar, a part behind the last backward, or waiting.
  point(event) {
    const box = this.canvas.getBoundingClientRect(), { gantt, report } = this;
    const row = Math.floor((event.clientY - box.top) / this.tall);
    const time = (event.clientX - box.left - this.left) / (this.width - this.left - RIGHT) * report.window;
    if (row < 0 || row >= this.numRows || time < 0 || time > gantt.step) { this.choose(-1, event); return; }
    const bar = this.row.findIndex((of, i) => of === row && this.start[i] <= time && time <= this.end[i]);
    this.choose(bar, event);
    if (bar >= 0) return;
    const part = gantt.behind.find(([, at, length]) => at <= time && time <= at + length);
    showTip(event, part ? `${gantt.name}: ${part[0]}, ${brief(part[2])}`
      : `${gantt.name}, rank ${gantt.ranks[Math.floor(row / gantt.stages)]}: waits`);
  }

  choose(bar, event) {
    const changed = bar !== this.chosen;
    this.chosen = bar;
    if (changed) this.draw();
    showTip(event, bar < 0 ? "" : this.describe(bar));
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
    this.choose(bar, { clientX: box.left + this.toX(this.start[bar]),
      clientY: box.top + (this.row[bar] + 1) * this.tall });
    document.getElementById("said").textContent = this.describe(bar);
  }
}
